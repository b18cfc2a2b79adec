"""Tools from PyPI, each in an environment of its own in the user's cache, so that it changes nothing here."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path


class NotAnswered(Exception):
    """What had to be asked could not be: a package index, a database."""


def isolated(requirement: str) -> Path:
    """The directory of the programs of `name==version`, installed once."""
    name, _, version = requirement.partition("==")
    cache = Path(os.environ.get("POLAR_CACHE") or Path.home() / ".cache" / "polar").expanduser()
    place = cache / f"{name}-{version}-{sys.version_info.major}.{sys.version_info.minor}"
    if not (place / "bin" / name).exists():
        venv.create(place, with_pip=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", requirement]
        if subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            raise NotAnswered(f"{requirement} cannot be installed here")
    return place / "bin"
