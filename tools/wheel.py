"""Builds the wheel of this clone from a clean copy, so that it contains nothing of an earlier build.

python tools/wheel.py dist
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "src")
UNWANTED = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")


def main() -> None:
    print(build(Path(sys.argv[1])))


def build(into: Path) -> Path:
    """Build the wheel with this environment's build backend, without downloads."""
    with tempfile.TemporaryDirectory() as copy, tempfile.TemporaryDirectory() as built:
        for part in PARTS:
            copy_part(ROOT / part, Path(copy, part))
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", built, copy], check=True)
        (wheel,) = Path(built).glob("*.whl")
        into.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, into / wheel.name))


def copy_part(source: Path, target: Path) -> None:
    """Copy a part, replacing links by files."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=UNWANTED)
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    main()
