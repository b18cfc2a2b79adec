"""Python programs with pinned packages in a directory of their own, run by this process's interpreter."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from polar.assets.cache import DownloadFailed
from polar.assets.tool import run_tool

PYTHON_TAG = f"py{sys.version_info.major}.{sys.version_info.minor}-{sysconfig.get_platform()}"
"""For names in the cache: packages with compiled parts serve one version on one platform."""


def python_root() -> Path:
    """The installation this interpreter belongs to, below which its virtual environments find their parts."""
    return Path(sys.base_prefix)


def python_program() -> Path:
    """The interpreter itself, relative to `python_root`."""
    return Path("bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


def install_python(requirements: Sequence[str], into: Path, *, with_dependencies: bool = True) -> None:
    """Install pinned requirements (whatever index pip is set up for) as importable packages below `into`.

    May be called again for the same directory: requirements already there are not looked at.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    command += [] if with_dependencies else ["--no-deps"]
    run = run_tool([*command, "--target", str(into), *requirements])
    if run.returncode != 0:
        errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip failed"
        raise DownloadFailed(
            f"could not install {requirements[0]} with pip: {reason}",
            hint=f"check the network and pip's index settings with: {' '.join(command[1:])} "
            f"--dry-run {' '.join(requirements)}",
        )
