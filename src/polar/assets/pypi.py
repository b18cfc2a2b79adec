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
    """One release of a package, and the files of it that may be taken."""

    requirement: str
    """`name==version`."""
    sha256: Sequence[str]
    """The hashes of its files, one for each platform."""

    def __str__(self) -> str:
        return self.requirement


def unpack_wheel(wheel: Wheel, into: Path) -> None:
    """Fetch a wheel with pip (whatever index pip is set up for) and unpack it; other files are refused."""
    into.mkdir(parents=True, exist_ok=True)
    lock = into / "wheel.txt"
    lock.write_text(" ".join([wheel.requirement, *(f"--hash=sha256:{digest}" for digest in wheel.sha256)]))
    _install(lock, into, failure=f"could not download {wheel} with pip", check=str(wheel))
    lock.unlink()


def _install(lock: Path, into: Path, *, failure: str, check: str) -> None:
    """Run pip on a lock file; DownloadFailed tells how to `check` what is wrong by hand."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    run = run_tool([*command, "--require-hashes", "--requirement", str(lock), "--target", str(into)])
    if run.returncode != 0:
        raise DownloadFailed(
            f"{failure}: {pip_reason(run.stderr)}",
            hint=f"check the network and pip's index settings with: {' '.join(command[1:])} {check}",
        )


def pip_reason(stderr: str) -> str:
    """Why pip failed, in a line."""
    if "DO NOT MATCH THE HASHES" in stderr:
        return "the index has other files than the pinned ones (their hashes differ)"
    said = [line.removeprefix("ERROR:").strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    return said[-1] if said else "no package came"


PYTHON_TAG = f"py{sys.version_info.major}.{sys.version_info.minor}-{sysconfig.get_platform()}"
"""For names in the cache: packages with compiled parts serve one version on one platform."""


def python_root() -> Path:
    """The installation this interpreter belongs to, below which its virtual environments find their parts."""
    return Path(sys.base_prefix)


def python_program() -> Path:
    """The interpreter itself, relative to `python_root`."""
    return Path("bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


def install_python(lock: Path, into: Path) -> None:
    """Install all packages of a lock file (whatever index pip is set up for) as importable below `into`.

    A package without a hash in the lock, or with another than that, is refused; so is one that has to be
    built, for that runs code.
    """
    check = f"--require-hashes --requirement {lock} --dry-run"
    failure = f"could not install the packages of {lock.name} with pip"
    _install(lock, into, failure=failure, check=check)
