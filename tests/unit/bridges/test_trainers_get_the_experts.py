"""Trainers that replay experts get those of every token, and are told of what they cannot get."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polar.bridges.nemo_gym import response
from polar.bridges.sessions import ScoredSession, scored_session
from polar.models.trace import Trace
from polar.trajectory.learnable import Excluded
from tests.fakes.agent_sessions import agent_sessions
from tests.fakes.routing import CHOSEN, LAYERS, routing_of
from tests.fakes.scripted_rollouts import sample
from tests.fakes.trace_oracle import context
from tests.fakes.trainer_types import SlimeSample, bridge, slime_train_data

verl, slime = map(bridge, ("verl", "slime"))

SHAPE = (LAYERS, CHOSEN)


@st.composite
def sessions(draw: st.DrawFn) -> ScoredSession:
    """Of some completions the engine told nothing."""
    completions = tuple(
        replace(one, routing=routing_of(context(one)))
        if len(one.sampled_ids) and draw(st.integers(0, 9))
        else one
        for one in draw(agent_sessions())
    )
    return scored_session(sample(completions, draw(st.sampled_from([0.0, 1.0, None]))), 1.0)


def ids_of(trace: Trace) -> list[int]:
    return [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]


@given(sessions())
def test_what_cannot_be_replayed_is_left_out_by_name(session: ScoredSession) -> None:
    routed = session.with_routing()
    assert all(trace.routing is not None and not trace.unrouted_tokens for trace in routed.traces)
    lost = routed.excluded[Excluded.TOKENS_UNROUTED]
    assert routed.trained_tokens + lost == session.trained_tokens


@given(sessions())
def test_verl_gets_the_experts_of_its_row(session: ScoredSession) -> None:
    made = verl.output(session, 0, SHAPE)
    ids = [*made.prompt_ids, *made.response_ids]
    assert made.routed_experts.shape == (len(ids) - 1, *SHAPE)
    if session.with_routing().traces:
        assert made.routed_experts.tolist() == routing_of(ids).tolist()
    else:
        assert made.response_mask == [0]
    assert verl.output(session, 0).routed_experts is None


@given(sessions())
def test_slime_gets_the_experts_of_every_sample(session: ScoredSession) -> None:
    made = slime.samples(session, SlimeSample(index=0), SHAPE)
    data: dict[str, Any] = slime_train_data(made)
    for one, told in zip(made, data["rollout_routed_experts"], strict=True):
        assert told.shape[1:] == SHAPE
        assert one.remove_sample or told.tolist() == routing_of(one.tokens).tolist()
    assert "rollout_routed_experts" not in slime_train_data(slime.samples(session, SlimeSample(index=0)))


@given(sessions())
def test_nemo_rl_gets_experts_and_is_told_where_there_are_none(session: ScoredSession) -> None:
    narrowed = session.with_one_trace()
    output = response(narrowed, {})["output"]
    items = [item for item in output if "generation_token_ids" in item]
    assert bool(items) is bool(narrowed.trained_tokens)
    for item in items:
        routing = narrowed.traces[0].routing
        assert ("routed_experts" in item) is (routing is not None)
        if routing is None:
            continue
        ids = [*item["prompt_token_ids"], *item["generation_token_ids"]]
        name, dtype, shape, data = item["routed_experts"].split(":")
        assert (name, dtype, shape) == ("nrlre1", "int16", f"{len(ids)}x{LAYERS}x{CHOSEN}")
        told = np.frombuffer(base64.b64decode(data), "<i2").reshape(len(ids), *SHAPE)
        known = routing[: len(ids)].any((1, 2))
        assert told[known].tolist() == routing_of([*ids, 0])[known].tolist()
        assert (told[~known] == -1).all()
