"""The benchmark's layouts train the same tokens of the same sessions to the same gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training.faithfulness import compare, compared, rescored, versions
from benchmarks.training.figure import chart
from benchmarks.training.gradients import Agreement, compare_gradients
from benchmarks.training.layouts import LAYOUTS, ONE_A_PASS, laid_out, reduced
from benchmarks.training.speed import measure
from polar.recordings.recording import Recording
from polar.training.policy import TrainerPolicy
from polar.training.settings import ModelSettings
from polar.trajectory.packing.batch import Batch
from tests.fakes.scoring_engine import ScoringEngine, logprobs_of
from tests.fakes.training_runs import LOGPROB, groups

BUDGET = 256


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return [one.recording for each in groups() for one in each.samples if one.recording is not None]


def test_every_layout_learns_the_same_from_fewer_tokens(
    tiny_model: Path, recordings: list[Recording]
) -> None:
    model = ModelSettings(name=str(tiny_model), device="cpu")
    measured = [measure(layout, recordings, model, BUDGET, least_seconds=0.0) for layout in LAYOUTS]
    assert len({one.trained_tokens for one in measured}) == 1
    tokens = [one.tokens for one in measured]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > tokens[1] > tokens[2]
    for one in measured[1:]:
        assert one.loss == pytest.approx(measured[0].loss, rel=1e-4)
        assert one.grad_norm == pytest.approx(measured[0].grad_norm, rel=1e-4)
    assert all(layout.name in chart("title", measured) for layout in LAYOUTS)


def test_trees_of_linear_attention_learn_what_one_trace_a_pass_does(
    tiny_hybrid: Path, recordings: list[Recording]
) -> None:
    model = ModelSettings(name=str(tiny_hybrid), device="cpu")
    alone, trees = (
        measure(layout, recordings, model, BUDGET, least_seconds=0.0) for layout in (ONE_A_PASS, LAYOUTS[2])
    )
    assert alone.passes == alone.traces > trees.passes
    assert alone.trained_tokens == trees.trained_tokens
    assert alone.tokens > trees.tokens
    assert trees.loss == pytest.approx(alone.loss, rel=1e-4)
    assert trees.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)


def test_gradients_are_one_in_double_precision_and_close_in_single(
    tiny_model: Path, recordings: list[Recording]
) -> None:
    found = compare_gradients(recordings[:2], ModelSettings(name=str(tiny_model), device="cpu"), BUDGET)
    assert not found.missed
    assert max(found.exact.values()) <= 1e-6
    assert 0 < max(found.rounding.values()) <= 1e-4


@pytest.mark.parametrize("leaks_in", [torch.float32, torch.float64], ids=str)
def test_a_mask_that_shows_a_trace_its_neighbours_is_found(
    tiny_model: Path, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch, leaks_in: torch.dtype
) -> None:
    measure = TrainerPolicy.measure

    def leaking(policy: TrainerPolicy, batch: Batch) -> tuple[Any, Any]:
        unending = replace(batch, ends=np.full_like(batch.ends, len(batch)))
        return measure(policy, unending if policy.parameters[0].dtype is leaks_in else batch)

    monkeypatch.setattr(TrainerPolicy, "measure", leaking)
    found = compare_gradients(recordings[:2], ModelSettings(name=str(tiny_model), device="cpu"), BUDGET)
    assert found.missed


def test_another_gradient_is_told_from_rounding() -> None:
    def missed(exact: float, rounding: float) -> list[str]:
        return Agreement(2, 10, {"merged": exact}, {"apart": 1e-5, "merged": rounding}, {}).missed

    assert not missed(1e-7, rounding=5e-5)
    assert missed(1e-7, rounding=2e-4) == ["merged: gradient in float32"]
    assert missed(1e-4, rounding=1e-5) == ["merged: another gradient"]


def test_sessions_that_do_not_fit_are_not_measured(recordings: list[Recording]) -> None:
    with pytest.raises(SystemExit, match="traces_over_budget"):
        laid_out(recordings, LAYOUTS[1], budget=6)


def test_a_reduced_session_keeps_its_shape(recordings: list[Recording]) -> None:
    (completion,) = reduced(recordings[0], calls=1, vocabulary=7).completions
    assert len(completion.sampled_ids) == len(recordings[0].completions[0].sampled_ids)
    assert max(completion.prompt_ids.max(), completion.sampled_ids.max()) < 7


def test_logprobs_are_compared_token_by_token(tiny_model: Path, recordings: list[Recording]) -> None:
    model = ModelSettings(name=str(tiny_model), device="cpu")
    counted = versions(recordings)
    rows = compared(recordings, version=0, temperature=1.0)
    found = compare(rows, model, "float32", budget=BUDGET, temperature=1.0)
    assert found.tokens == counted[0]
    # Recorded is one made-up number for all; an untrained policy is never exactly there.
    assert 0 < found.mean <= found.p99 <= found.max < -2 * LOGPROB
    assert not compared(recordings, version=9, temperature=1.0)
    with pytest.raises(SystemExit, match="no token"):
        compare([], model, "float32", budget=BUDGET, temperature=1.0)


async def test_sessions_that_are_scored_again_carry_what_the_engine_says(recordings: list[Recording]) -> None:
    before = compared(recordings, version=0, temperature=1.0)
    for was, now in zip(before, await rescored(before, ScoringEngine()), strict=True):
        assert (was.name, was.ids.tolist()) == (now.name, now.ids.tolist())
        expected = np.array(logprobs_of(now.ids.tolist()), np.float32)[now.trained.depths]
        assert now.trained.logprobs.tolist() == expected.tolist()
