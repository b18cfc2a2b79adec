"""The packages of verl, SkyRL, AReaL and NeMo Gym, in a directory of their own in the cache."""

from __future__ import annotations

import importlib
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import typing_extensions

from polar.assets.cache import asset
from polar.bridges.sessions import ScoredSession, scored_session
from tests.fakes.routing import routing_of
from tests.fakes.scripted_rollouts import sample, turns

TRAINERS = ("verl==0.9.1", "skyrl==0.4.0", "areal==1.0.4", "nemo-gym==0.7.0")
IMPORTED = (
    "aiofiles==25.1.0",
    "antlr4-python3-runtime==4.9.3",
    "blinker==1.9.0",
    "cachetools==8.0.0",
    "cloudpathlib==0.26.0",
    "cloudpickle==3.1.2",
    "codetiming==1.4.0",
    "colorlog==6.12.0",
    "einops==0.8.2",
    "flask==3.1.3",
    "hydra-core==1.3.8",
    "importlib-metadata==10.2.0",
    "itsdangerous==2.2.0",
    "jaxtyping==0.3.11",
    "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1",
    "lark==1.3.1",
    "llvmlite==0.50.0",
    "loguru==0.7.3",
    "msgpack==1.2.4",
    "msgspec==0.22.0",
    "numba==0.68.1",
    "omegaconf==2.4.0",
    "pillow==13.0.0",
    "pybase64==1.5.1",
    "pybind11==3.1.0",
    "pydantic-settings==2.16.2",
    "pydot==4.0.1",
    "pyroaring==1.2.0",
    "pyvers==0.2.3",
    "ray==2.60.0",
    "referencing==0.37.0",
    "rpds-py==2026.9.1",
    "scipy==1.17.1",
    "skyrl-gym==0.4.0",
    "tensordict==0.10.0",
    "torchdata==0.11.0",
    "wandb==0.31.0",
    "werkzeug==3.1.9",
    "yappi==1.7.6",
    "zipp==4.1.2",
)
"""What their modules import that Polar's environment lacks. They ask for other releases of Python, torch and
transformers than are here; what is tested of them does not."""


def _install(into: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    subprocess.run(
        [*pip, "--ignore-requires-python", "--target", str(into), *TRAINERS, *IMPORTED], check=True
    )


@pytest.fixture(scope="session")
def trainers() -> Iterator[Path]:
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    directory = asset("-".join(["trainers", *TRAINERS, version]).replace("==", "-"), _install)
    with pytest.MonkeyPatch.context() as patch:
        # Behind everything that is installed: what Polar has itself is not replaced.
        patch.setattr(sys, "path", [*sys.path, str(directory)])
        # SkyRL needs Python 3.12 for this alone: before it, pydantic reads only the other one's classes.
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        yield directory


def without_its_imports(package: str) -> None:
    """Let modules of a package be imported without what its __init__ imports (loggers, engines)."""
    parent, _, name = package.rpartition(".")
    module = ModuleType(package)
    module.__path__ = [str(Path(path, name)) for path in importlib.import_module(parent).__path__]
    sys.modules[package] = module


@pytest.fixture
def session() -> ScoredSession:
    """Two turns that are one trace, with reward 1."""
    made = sample(turns((1, 2, 3), [[10, 11], [13]]), 1.0)
    return scored_session(made, 1.0)


@pytest.fixture
def with_routing() -> ScoredSession:
    """Of a mixture of experts: a conversation of two answers, with the experts of all its tokens."""
    calls = turns((1, 2, 3), [[10, 11], [13]])
    told = tuple(
        replace(call, routing=routing_of([*call.prompt_ids.tolist(), *call.sampled_ids.tolist()]))
        for call in calls
    )
    return scored_session(sample(told, 1.0), 1.0)


@pytest.fixture
def group(session: ScoredSession) -> list[ScoredSession]:
    """One trace and reward 1, two traces and 0, one that failed, and one with reward 0 and no trace."""
    return [session, _session(1, 0.0, traces=2), _session(2, None, traces=1), _session(3, 0.0, traces=0)]


def _session(number: int, reward: float | None, *, traces: int) -> ScoredSession:
    calls = [turns((trace, 2, 3), [[20 + trace, 21]])[0] for trace in range(traces)]
    named = tuple(replace(call, id=f"c{place}", index=place) for place, call in enumerate(calls))
    made = sample(named, reward, number=number)
    found = scored_session(made, 1.0)
    assert len(found.traces) == (0 if reward is None else traces)
    return found
