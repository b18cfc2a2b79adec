"""A checkpoint of the user's own, in a directory of any name, served as Polar's commands serve it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CHECKPOINT = "POLAR_CHECKPOINT"
NEEDS = (
    f"NOT TESTED: set {CHECKPOINT} to the directory of a model that calls tools (config.json, tokenizer.json"
    " with its chat template, weights as safetensors). A model of 0.5B in float32 takes 4 GB of memory and"
    " five minutes on two cores. POLAR_CHECKPOINT_TOOL_FORM names the form of its calls (engine.tool_form),"
    " where it writes another than its template shows, POLAR_CHECKPOINT_URL a running engine with the"
    " model in place of `polar engine`, started as docs/engines.md says"
)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    named = os.environ.get(CHECKPOINT)
    if not named:
        pytest.skip(NEEDS)
    directory = Path(named).absolute()
    if missing := [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]:
        pytest.fail(f"{CHECKPOINT}: {directory} has no {', '.join(missing)}")
    return directory


@pytest.fixture(scope="session")
def engine_url() -> str | None:
    return os.environ.get("POLAR_CHECKPOINT_URL")


@pytest.fixture(scope="session")
def tool_form() -> str | None:
    return os.environ.get("POLAR_CHECKPOINT_TOOL_FORM")
