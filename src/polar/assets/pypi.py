"""Pinned wheels of the package index, and programs installed from a lock file with hashes."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polar.assets.cache import DownloadFailed, run_tool


@dataclass(frozen=True, slots=True)
class Wheel:
    """One release of a package and the hashes of the files that may be installed."""

    requirement: str
    """`name==version`."""
    sha256: Sequence[str]

    def __str__(self) -> str:
        return self.requirement


def unpack_wheel(wheel: Wheel, into: Path) -> None:
    """Download a wheel with pip, from the index pip is configured for, and unpack it; check its hash."""
    into.mkdir(parents=True, exist_ok=True)
    lock = into / "wheel.txt"
    lock.write_text(" ".join([wheel.requirement, *(f"--hash=sha256:{digest}" for digest in wheel.sha256)]))
    _install(lock, into, failure=f"could not download {wheel} with pip", check=str(wheel))
    lock.unlink()


def _install(lock: Path, into: Path, *, failure: str, check: str) -> None:
    """Run pip on a lock file; on failure, DownloadFailed says how to check by hand."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    run = run_tool([*command, "--require-hashes", "--requirement", str(lock), "--target", str(into)])
    if run.returncode != 0:
        raise DownloadFailed(
            f"{failure}: {pip_reason(run.stderr)}",
            hint=f"check the network and pip's index settings with: {' '.join(command[1:])} {check}",
        )


def pip_reason(stderr: str) -> str:
    """Return why pip failed, on one line."""
    if "DO NOT MATCH THE HASHES" in stderr:
        return "the index serves files whose hashes differ from the pinned ones"
    said = [line.removeprefix("ERROR:").strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    return said[-1] if said else "pip downloaded no package"


PYTHON_TAG = f"py{sys.version_info.major}.{sys.version_info.minor}-{sysconfig.get_platform()}"
"""Part of names in the cache, since compiled packages fit one Python version on one platform."""


def python_root() -> Path:
    """Return the installation that this interpreter belongs to, which virtual environments refer to."""
    return Path(sys.base_prefix)


def python_program() -> Path:
    return Path("bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


def install_python(lock: Path, into: Path) -> None:
    """Install every package of a lock file below `into`, from the index pip is configured for.

    A package is refused if its hash is missing or differs, or if it has to be built: that runs code.
    """
    check = f"--require-hashes --requirement {lock} --dry-run"
    failure = f"could not install the packages of {lock.name} with pip"
    _install(lock, into, failure=failure, check=check)
