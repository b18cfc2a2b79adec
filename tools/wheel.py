"""Builds the wheel of this clone from a clean copy, so that nothing of an earlier build gets into it.

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
    """The wheel, made by the build backend that this environment has: nothing is downloaded."""
    with tempfile.TemporaryDirectory() as copy, tempfile.TemporaryDirectory() as built:
        for part in PARTS:
            copy_part(ROOT / part, Path(copy, part))
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", built, copy], check=True)
        (wheel,) = Path(built).glob("*.whl")
        into.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, into / wheel.name))


def copy_part(source: Path, target: Path) -> None:
    """What is a link in a clone is a file in the copy."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=UNWANTED)
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    main()
