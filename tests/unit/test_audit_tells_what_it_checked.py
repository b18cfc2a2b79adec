"""`make audit`: fails for a known vulnerability, passes without one, and says where it asked nobody."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "audit.py"

CLEAN = {"name": "idna", "version": "3.20", "vulns": []}
BAD = {"name": "idna", "version": "3.20", "vulns": [{"id": "CVE-1", "fix_versions": ["3.21"]}]}
UNKNOWN = {"name": "idna", "skip_reason": "not found"}
CANARY = {"name": "jinja2", "version": "2.10", "vulns": [{"id": "CVE-0", "fix_versions": []}]}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("polar_audit_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "auditor_program", lambda: tmp_path / "auditor")
    return module


def auditor(tmp_path: Path, canary: object, pinned: object) -> None:
    """Stands for pip-audit: one answer about the release that is known to be bad, one about ours."""
    script = tmp_path / "auditor"
    answers = [json.dumps({"dependencies": [answer]}) if answer else "" for answer in (canary, pinned)]
    is_canary = "grep -q '^jinja2==2.10$' \"$2\""
    script.write_text(f"#!/bin/sh\nif {is_canary}; then echo '{answers[0]}'; else echo '{answers[1]}'; fi\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("canary", "pinned", "code", "said"),
    [
        (CANARY, CLEAN, 0, "1 packages checked (pypi), 0 with known vulnerabilities"),
        (CANARY, BAD, 1, "idna 3.20: CVE-1, fixed in 3.21"),
        (CANARY, UNKNOWN, 0, "unknown to the database: idna"),
        (UNKNOWN, CLEAN, 0, "skipped: make audit checked nothing"),
        (None, CLEAN, 0, "skipped: make audit checked nothing"),
    ],
)
def test_the_audit_says_what_it_found_or_that_it_did_not_look(
    tool: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    canary: object,
    pinned: object,
    code: int,
    said: str,
) -> None:
    auditor(tmp_path, canary, pinned)
    assert tool.main() == code
    assert said in capsys.readouterr().out
