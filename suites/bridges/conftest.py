"""The packages of verl, SkyRL and AReaL, in a directory of their own in the cache and without their torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.assets.cache import asset

TRAINERS = ("verl==0.9.1", "skyrl==0.3.0", "areal==1.0.4")
IMPORTED = (
    "aiofiles==25.1.0",
    "antlr4-python3-runtime==4.9.3",
    "blinker==1.9.0",
    "cachetools==8.0.0",
    "cloudpickle==3.1.2",
    "codetiming==1.4.0",
    "colorlog==6.12.0",
    "einops==0.8.2",
    "flask==3.1.3",
    "hydra-core==1.3.8",
    "importlib-metadata==10.2.0",
    "itsdangerous==2.2.0",
    "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1",
    "lark==1.3.1",
    "llvmlite==0.50.0",
    "msgpack==1.2.4",
    "msgspec==0.22.0",
    "numba==0.68.1",
    "omegaconf==2.4.0",
    "pillow==13.0.0",
    "pybind11==3.1.0",
    "pyvers==0.2.3",
    "ray==2.60.0",
    "referencing==0.37.0",
    "rpds-py==2026.9.1",
    "tensordict==0.10.0",
    "torchdata==0.11.0",
    "werkzeug==3.1.9",
    "zipp==4.1.2",
)
"""What their modules import that Polar's environment lacks. They ask for older releases of torch and
transformers than are here; their types do not."""


def _install(into: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    subprocess.run([*pip, "--target", str(into), *TRAINERS, *IMPORTED], check=True)


@pytest.fixture(scope="session")
def trainers() -> Iterator[Path]:
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    directory = asset("-".join(["trainers", *TRAINERS, version]).replace("==", "-"), _install)
    # Behind everything that is installed: what Polar has itself is not replaced.
    sys.path.append(str(directory))
    yield directory
    sys.path.remove(str(directory))
