"""What becomes of a Python tool whose packages cannot be installed, and where its interpreter is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from polar.assets.cache import DownloadFailed
from polar.assets.pytool import install_python, python_program, python_root


def test_a_package_that_cannot_be_had_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadFailed, match=r"no-such-tool==1\.0") as raised:
        install_python(["no-such-tool==1.0"], tmp_path / "tool")
    assert raised.value.hint is not None
    assert "--dry-run no-such-tool==1.0" in raised.value.hint


def test_the_interpreter_runs_without_a_virtual_environment() -> None:
    run = subprocess.run(
        [python_root() / python_program(), "-I", "-S", "-c", "import sys; print(sys.base_prefix)"],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    assert Path(run.stdout.strip()) == python_root()
