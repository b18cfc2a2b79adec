"""Python packages: taken as they are locked or refused with a reason, and where a tool's interpreter is."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from polar.assets.cache import DownloadFailed
from polar.assets.pypi import Wheel, install_python, python_program, python_root, unpack_wheel

OTHER = "0" * 64


@pytest.fixture
def sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the one wheel that pip can find, `thing` 1.0."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "thing-1.0-py3-none-any.whl"
    about = "thing-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing.py", "")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def lock(directory: Path, line: str) -> Path:
    path = directory / "tool.txt"
    path.write_text(line)
    return path


def test_what_is_locked_is_installed(tmp_path: Path, sha256: str) -> None:
    install_python(lock(tmp_path, f"thing==1.0 --hash=sha256:{sha256}"), tmp_path / "tool")
    assert (tmp_path / "tool" / "thing.py").is_file()


@pytest.mark.parametrize("line", [f"thing==1.0 --hash=sha256:{OTHER}", "thing==1.0"])
@pytest.mark.usefixtures("sha256")
def test_a_package_with_another_hash_or_none_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(DownloadFailed, match="hash"):
        install_python(lock(tmp_path, line), tmp_path / "tool")
    assert not (tmp_path / "tool" / "thing.py").exists()


def test_a_pinned_wheel_is_unpacked(tmp_path: Path, sha256: str) -> None:
    unpack_wheel(Wheel("thing==1.0", sha256=(OTHER, sha256)), tmp_path / "into")
    unpacked = {path.name for path in (tmp_path / "into").iterdir()}
    assert unpacked - {"__pycache__"} == {"thing-1.0.dist-info", "thing.py"}


@pytest.mark.usefixtures("sha256")
def test_a_wheel_that_was_tampered_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"thing==1\.0 with pip: .*hashes differ"):
        unpack_wheel(Wheel("thing==1.0", sha256=(OTHER,)), tmp_path / "into")
    assert not (tmp_path / "into" / "thing.py").exists()


@pytest.mark.usefixtures("sha256")
def test_a_package_that_cannot_be_had_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"tool\.txt with pip: .*no-such-tool==1\.0") as raised:
        install_python(lock(tmp_path, f"no-such-tool==1.0 --hash=sha256:{OTHER}"), tmp_path / "tool")
    assert raised.value.hint is not None
    assert raised.value.hint.endswith("tool.txt --dry-run")


def test_the_interpreter_runs_without_a_virtual_environment() -> None:
    run = subprocess.run(
        [python_root() / python_program(), "-I", "-S", "-c", "import sys; print(sys.base_prefix)"],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    assert Path(run.stdout.strip()) == python_root()
