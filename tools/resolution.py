"""Resolves Polar together with the newest vLLM, TRL and verl, which its users have installed.

    python3 -m tools.resolution

Fails if Polar's version ranges exclude one of the newest releases. Only metadata is read.
If no package index can be reached, it says that nothing was checked; only in CI ($CI is set) does that fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.isolated import NotAnswered, install_isolated

ROOT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.7"
EXTRAS = ("engine", "train", "renderers")
NEIGHBOURS = (("vllm",), ("trl",), ("verl",), ("vllm", "trl"))
"""Packages to install in one environment with Polar. The newest vLLM and verl exclude each other."""
TARGET = ("--python-version", "3.12", "--python-platform", "linux")
UNREACHABLE = ("Failed to fetch", "dns error", "Network connectivity is disabled", "Connection refused")


class Conflict(Exception):
    """No set of releases satisfies all requirements; the message is the resolver's."""


def main() -> int:
    try:
        uv_program()  # once, before the threads would all do it
        with ThreadPoolExecutor() as threads:
            found = list(threads.map(conflict, NEIGHBOURS))
    except NotAnswered as error:
        print(f"skipped: make test-resolution checked nothing: {error}")
        return 1 if os.environ.get("CI") else 0
    for neighbours, reason in zip(NEIGHBOURS, found, strict=True):
        print(f"{' and '.join(neighbours)}: {reason or 'resolves together with Polar'}")
    return 1 if any(found) else 0


def conflict(neighbours: tuple[str, ...]) -> str | None:
    """Return why Polar cannot be installed beside the newest releases of these packages, or None."""
    newest = resolve(*neighbours)
    wanted = [f"{name}=={newest[name]}" for name in neighbours]
    polar = [str(ROOT / "pyproject.toml"), *(f"--extra={extra}" for extra in EXTRAS)]
    try:
        resolve(*wanted, more=polar)
    except Conflict as error:
        return f"conflicts with {', '.join(wanted)}:\n{error}"
    return None


def resolve(*requirements: str, more: list[str] | None = None) -> dict[str, str]:
    """Return the version of every package that would be installed."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write("\n".join(requirements))
        file.flush()
        uv = [str(uv_program()), "pip", "compile", "--quiet", "--no-annotate", "--system-certs", *TARGET]
        run = subprocess.run([*uv, file.name, *(more or [])], capture_output=True, text=True, cwd="/")
    if run.returncode and any(words in run.stderr for words in UNREACHABLE):
        raise NotAnswered(run.stderr.strip().splitlines()[0])
    if run.returncode:
        raise Conflict(run.stderr.strip())
    return dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", run.stdout, re.MULTILINE))


def uv_program() -> Path:
    return install_isolated(UV) / "uv"


if __name__ == "__main__":
    sys.exit(main())
