"""Python programs with pinned packages in a directory of their own, run by this process's interpreter."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from polar.assets.cache import DownloadFailed
from polar.assets.pypi import pip_reason
from polar.assets.tool import run_tool

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
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--no-deps"]
    command += ["--require-hashes", "--requirement", str(lock)]
    run = run_tool([*command, "--target", str(into)])
    if run.returncode != 0:
        raise DownloadFailed(
            f"could not install the packages of {lock.name} with pip: {pip_reason(run.stderr)}",
            hint=f"check the network and pip's index settings with: {' '.join(command[1:])} --dry-run",
        )
