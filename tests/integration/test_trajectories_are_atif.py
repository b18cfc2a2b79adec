"""What `polar results --format atif` writes is valid by the models of Harbor, whose format it is."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from polar.assets.cache import asset, run_tool
from polar.models.completion import Completion
from polar.tasksets.export import ExportedSession
from tests.fakes.agent_sessions import agent_sessions
from tests.fakes.recordings import recording
from tests.fakes.trajectories import documents, exported, written

HARBOR = "harbor==0.25.0"
SHA256 = "51923ac567fc57b03279e93468b105f689628bcac2cd3d541d4e44aa5c0ec309"
MODELS = "harbor/models/trajectories/"


def unpack_models(into: Path) -> None:
    """Take only the models of the format out of the wheel: Harbor itself needs a later Python."""
    lock = into / "wheel.txt"
    lock.write_text(f"{HARBOR} --hash=sha256:{SHA256}")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--python-version=3.12", "--require-hashes", f"--requirement={lock}", f"--dest={into}"]
    run = run_tool(pip)
    assert run.returncode == 0, run.stderr
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name.startswith(MODELS)])
    wheel.unlink()


@pytest.fixture(scope="module")
def trajectory() -> Iterator[Any]:
    """Harbor's model of a trajectory."""
    place = str(asset(HARBOR.replace("==", "-trajectories-"), unpack_models))
    sys.path.insert(0, place)
    try:
        yield importlib.import_module("harbor.models.trajectories").Trajectory
    finally:
        sys.path.remove(place)


def test_a_session_with_tools_and_a_side_call_is_valid(trajectory: Any, tmp_path: Path) -> None:
    made = recording()
    read = trajectory.model_validate(written(ExportedSession(made.result, {}, made, "pi"), tmp_path))
    first, *_ = (step for step in read.steps if step.source == "agent")
    assert first.metrics.completion_token_ids == made.completions[0].sampled_ids.tolist()
    assert first.observation.results[0].source_call_id == first.tool_calls[0].tool_call_id
    assert len(read.subagent_trajectories) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(completions=agent_sessions())
def test_any_session_is_valid(trajectory: Any, completions: list[Completion], tmp_path: Path) -> None:
    root = written(exported(completions), tmp_path)
    read = trajectory.model_validate(root)
    assert read.to_json_dict() == root
    assert 1 + len(read.subagent_trajectories or []) == len(documents(root))


def test_the_newest_version_of_the_format_is_written(trajectory: Any, tmp_path: Path) -> None:
    root = written(exported(list(recording().completions)), tmp_path)
    assert root["schema_version"] == trajectory.model_fields["schema_version"].default
