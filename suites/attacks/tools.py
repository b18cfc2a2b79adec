"""The programs that exams are graded with, as directories that every sandbox can be given."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from functools import cache, partial
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath
from typing import Any

from polar.assets.cache import asset, lock_tag
from polar.assets.node import install_npm, node
from polar.evaluators.attacks import Kind
from polar.runtimes.base import ToolDirectory
from suites.engines import missing

PYTEST = "/opt/pytest"
"""Where sandboxes have pytest, which is not the system's."""
RUNNERS = "/opt/runners/node_modules"
"""Where they have jest, vitest, mocha and bun."""
IMAGE_PROGRAMS = "/opt/venv/bin"
"""Where images have the programs of an environment of their own."""
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
WITH_NODE = {"PATH": f"/opt/node/bin:{SYSTEM_PATH}"}
WITH_RUST = {"PATH": f"/opt/cargo/bin:{SYSTEM_PATH}", "RUSTUP_HOME": "/opt/rustup"}
PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging")
LOCK = Path(__file__).parent / "runners" / "package-lock.json"


def tools_of(kind: Kind, scratch: Path) -> tuple[ToolDirectory, ...]:
    """What the exams of a kind need; `scratch` is a directory for what is made here."""
    match kind:
        case Kind.PYTEST:
            return (_pytest(scratch),)
        case Kind.NODE:
            return (_node(),)
        case Kind.JEST | Kind.VITEST | Kind.MOCHA | Kind.BUN:
            return (_node(), _runners())
        case Kind.CARGO:
            return _rust()
        case _:
            return ()


def environment_of(options: Mapping[str, Any]) -> dict[str, str]:
    """The variables that an exam is graded with; agents have them, too."""
    return dict(options.get("env", {}))


@cache
def _pytest(scratch: Path) -> ToolDirectory:
    directory = scratch / "pytest"
    directory.mkdir(0o755)
    for name in PACKAGES:
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                target = directory / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)
    return ToolDirectory(directory, PurePosixPath(PYTEST))


@cache
def _node() -> ToolDirectory:
    return ToolDirectory(node(), PurePosixPath("/opt/node"))


@cache
def _runners() -> ToolDirectory:
    packages = asset(f"test-runners-{lock_tag(LOCK)}", partial(install_npm, LOCK))
    return ToolDirectory(packages / "node_modules", PurePosixPath(RUNNERS))


def _rust() -> tuple[ToolDirectory, ...]:
    """A toolchain of rustup's: it obeys rust-toolchain.toml, which cargo alone does not."""
    cargo = shutil.which("cargo")
    if cargo is None or shutil.which("rustup") is None:
        missing("cargo and rustup (https://rustup.rs)")
    home = subprocess.run(["rustup", "show", "home"], capture_output=True, text=True, check=True)
    return (
        ToolDirectory(Path(home.stdout.strip()), PurePosixPath("/opt/rustup")),
        ToolDirectory(Path(str(cargo)).parent, PurePosixPath("/opt/cargo/bin")),
    )
