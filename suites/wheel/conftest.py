"""The wheel, built here and installed with pip into a fresh environment that has what it asks for alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from suites.wheel.installed import Installed
from tools.wheel import PARTS, ROOT, build

EXTRAS = "engine,train"
MAKE_ENVIRONMENT = f"import environment; environment.make_environment({EXTRAS.split(',')})"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Its packages come from the cache, where `make quickstart` puts the same ones; pip may add nothing."""
    place = tmp_path_factory.mktemp("fresh")
    for part in (*PARTS[:3], "constraints.txt", "tools/environment.py"):
        (place / part).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / part, place / part)
    subprocess.run([sys.executable, "-c", MAKE_ENVIRONMENT], cwd=place / "tools", check=True)
    found = Installed(place / ".venv" / "bin")
    found.run(place, "python", "-m", "pip", "install", "--no-index", f"{wheel}[{EXTRAS}]")
    return found
