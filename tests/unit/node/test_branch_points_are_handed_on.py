"""Where branches leave a session is worked out with its traces, and costs it nothing where that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.models.component import Component, Frozen
from polar.models.delivery import Delivery
from polar.models.session import LeaseKey
from polar.node import packing
from polar.node.artifacts import Artifacts
from polar.recordings.capture import CaptureWriter
from polar.recordings.tree import TokenTree
from polar.trajectory.branching import BranchingStrategy
from tests.fakes.extensions import registered
from tests.fakes.recordings import recording

BUILDER = Component(name="prefix_merging")
CHOSEN = Component(name="chosen")


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Two turns of a conversation and a side call that was cancelled."""
    writer = CaptureWriter(tmp_path / "session.log")
    for completion in recording().completions:
        writer.append(completion)
    writer.close()
    return writer.path


def choose(monkeypatch: pytest.MonkeyPatch, chosen: Any) -> None:
    """Register a strategy with this answer, or that raises it."""

    class Chosen(BranchingStrategy):
        class Options(Frozen):
            pass

        def points(self, tree: TokenTree) -> tuple[int, ...]:
            if isinstance(chosen, Exception):
                raise chosen
            return tuple(chosen)

    registered(monkeypatch, "branchings", chosen=Chosen)


def test_a_session_is_branched_where_the_strategy_says(capture: Path) -> None:
    built = packing.build(capture, BUILDER, Component(name="calls", options={"calls": [1]}))
    assert (built.branch_at, built.warnings) == ((1,), ())
    assert packing.build(capture, BUILDER).branch_at == ()


def test_points_of_any_strategy_come_in_order(capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, [2, np.int64(1), 2])
    built = packing.build(capture, BUILDER, CHOSEN)
    assert built.branch_at == (1, 2)
    assert [type(point) for point in built.branch_at] == [int, int]


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (ValueError("no idea"), "no branches: strategy chosen: ValueError('no idea')"),
        (InvalidInput("no idea"), "no branches: strategy chosen: no idea"),
        ([3], "it chose (3,) of 3 model calls"),
        ([-1, 1], "it chose (-1, 1) of 3 model calls"),
        ([1.5], "'float' object cannot be interpreted as an integer"),
    ],
)
def test_a_strategy_that_fails_is_a_warning(
    capture: Path, monkeypatch: pytest.MonkeyPatch, chosen: Any, told: str
) -> None:
    choose(monkeypatch, chosen)
    built = packing.build(capture, BUILDER, CHOSEN)
    assert built.branch_at == ()
    (warning,) = built.warnings
    assert told in warning
    assert built.stats == packing.build(capture, BUILDER).stats


def test_a_strategy_that_is_not_installed_is_a_warning(capture: Path) -> None:
    (warning,) = packing.build(capture, BUILDER, Component(name="nowhere")).warnings
    assert "unknown name 'nowhere'" in warning
    assert all(name in warning for name in plugins.names("branchings"))


def test_warnings_of_a_result_are_kept_beside_those_of_artifacts(capture: Path, tmp_path: Path) -> None:
    artifacts = Artifacts(1_000, tmp_path / "artifacts")
    artifacts.fail("final.diff", OSError("it is a link"))
    result = recording().result.model_copy(update={"warnings": ("no branches: …",), "branch_at": (1,)})
    delivery = Delivery(key=LeaseKey(fencing_token=1, secret="s"), result=result)
    packed = packing.pack(delivery, capture, BUILDER, artifacts, ()).result
    assert packed.warnings == ("no branches: …", "artifact final.diff: it is a link")
    assert packed.branch_at == (1,)
