"""Tools from PyPI, each in its own environment in the user's cache, so that nothing changes here."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path


class NotAnswered(Exception):
    """A package index or a database could not be queried."""


def install_isolated(requirement: str) -> Path:
    """Install `name==version` once, and return the directory of its programs."""
    name, _, version = requirement.partition("==")
    cache = Path(os.environ.get("POLAR_CACHE") or Path.home() / ".cache" / "polar").expanduser()
    place = cache / f"{name}-{version}-{sys.version_info.major}.{sys.version_info.minor}"
    if not (place / "bin" / name).exists():
        venv.create(place, with_pip=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", requirement]
        if subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            raise NotAnswered(f"cannot install {requirement}")
    return place / "bin"
