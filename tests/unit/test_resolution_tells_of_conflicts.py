"""`make test-resolution` fails for a conflict and says when nobody answers; pins are in one place alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tools import resolution

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFLICT = "Because vllm>=0.32.0 depends on fastapi<0.137.0"


def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: str, together: str) -> None:
    """Stands for uv: one answer about a package alone, one about the package together with Polar."""
    script = tmp_path / "uv"
    script.write_text(f'#!/bin/sh\ncase "$*" in *pyproject.toml*) {together};; *) {alone};; esac\n')
    script.chmod(0o755)
    monkeypatch.setattr(resolution, "uv_program", lambda: script)
    monkeypatch.setattr(resolution, "NEIGHBOURS", (("vllm",),))


@pytest.mark.parametrize(
    ("alone", "together", "code", "said"),
    [
        ("echo vllm==0.32.0", "echo vllm==0.32.0", 0, "vllm: resolves together with Polar"),
        ("echo vllm==0.32.0", f"echo '{CONFLICT}' >&2; exit 1", 1, CONFLICT),
        (
            "echo 'Failed to fetch: `…`' >&2; exit 2",
            "exit 2",
            0,
            "skipped: make test-resolution checked nothing",
        ),
    ],
)
def test_a_conflict_fails_and_an_index_that_does_not_answer_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    alone: str,
    together: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    uv(tmp_path, monkeypatch, alone, together)
    assert resolution.main() == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "code"), [("echo 'Failed to fetch: `…`' >&2; exit 2", 1), ("echo vllm==0.32.0", 0)]
)
def test_in_ci_an_index_that_does_not_answer_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    """Or else a change would land that nothing was checked of."""
    monkeypatch.setenv("CI", "true")
    uv(tmp_path, monkeypatch, alone=answer, together=answer)
    assert resolution.main() == code


def test_exact_versions_are_in_the_constraints_alone() -> None:
    asked = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    assert not [requirement for requirement in asked if "==" in requirement.partition(";")[0]]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
