"""Whatever is merged, forked, cut and stored: a token has the experts it was computed with, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from polar.models.chat import FinishReason
from polar.models.completion import Completion
from polar.models.trace import DriftPolicy, Trace
from polar.recordings import recording
from polar.recordings.capture import frames, opened, parse_capture
from polar.trajectory.base import Builder
from polar.trajectory.packing.batch import row
from polar.trajectory.packing.pack import pack_sequences, pack_trees
from polar.trajectory.per_request import PerRequest
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow
from tests.fakes.agent_sessions import agent_sessions
from tests.fakes.routing import routing_of
from tests.fakes.sessions import completion, sessions
from tests.fakes.trace_oracle import context, traces
from tests.unit.trajectory.test_recordings_round_trip import captured, encoded

BUILDERS = st.just(PerRequest(PerRequest.Options())) | st.builds(
    lambda **options: PrefixMerging(PrefixMerging.Options(**options)),
    drift=st.sampled_from([DriftPolicy.FORK, DriftPolicy.REALIGN]),
    max_response_tokens=st.none() | st.integers(1, 30),
)


@st.composite
def routed_sessions(draw: st.DrawFn) -> list[Completion]:
    """Of some completions the engine tells nothing, of others only from some token on."""
    found = []
    for one in draw(sessions() | agent_sessions()):
        whole = context(one)
        start = draw(st.just(0) | st.integers(0, len(whole)))
        told = routing_of(whole, start) if draw(st.integers(0, 4)) and len(one.sampled_ids) else None
        found.append(replace(one, routing=told if told is not None and len(told) else None))
    return found


def ids_of(trace: Trace) -> list[int]:
    return [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]


@given(routed_sessions(), BUILDERS)
def test_each_token_has_its_own_experts_or_none(completions: list[Completion], builder: Builder) -> None:
    for trace in traces(builder.build(grow(completions))):
        if trace.routing is None:
            continue
        assert len(trace.routing) == len(ids_of(trace))
        expected = routing_of([*ids_of(trace), 0])
        known = np.flatnonzero(trace.routing.any((1, 2)))
        assert trace.routing[known].tolist() == expected[known].tolist()
        assert trace.unrouted_tokens == len(ids_of(trace)) - 1 - np.count_nonzero(
            known < len(ids_of(trace)) - 1
        )


@given(sessions() | agent_sessions(), BUILDERS)
def test_nothing_is_missing_where_engines_tell_of_all(
    completions: list[Completion], builder: Builder
) -> None:
    told = [replace(one, routing=routing_of(context(one))) for one in completions if len(one.sampled_ids)]
    for trace in traces(builder.build(grow(told))):
        assert trace.unrouted_tokens == 0


def test_a_prompt_has_the_experts_of_the_first_who_told_them() -> None:
    """A client that leaves costs the experts of what it left, not those of the same prompt asked again."""
    prompt, answer = [1, 2, 3, 4], [5, 6, 7]
    left = replace(completion(0, prompt, [5, 9]), finish_reason=FinishReason.CANCELLED)
    again = replace(completion(1, prompt, answer), routing=routing_of([*prompt, *answer]))
    more = [*prompt, *answer, 8, 9]
    later = replace(completion(2, more, [3, 2]), routing=routing_of([*more, 3, 2], len(prompt) + 2))
    session = [left, again, later]
    before = PrefixMerging(PrefixMerging.Options()).build(grow(session))
    after = recording.decode(encoded(session, before)).trajectory
    again_built = PrefixMerging(PrefixMerging.Options()).build(parse_capture(captured(session)))
    for built in (before, after, again_built):
        (trace,) = traces(built)
        assert trace.routing is not None
        assert trace.routing[:-1].tolist() == routing_of([*more, 3, 2]).tolist()


@given(routed_sessions(), BUILDERS)
def test_a_recording_gives_the_experts_back(completions: list[Completion], builder: Builder) -> None:
    before = builder.build(grow(completions))
    after = recording.decode(encoded(completions, before)).trajectory
    from_capture = builder.build(parse_capture(captured(completions)))
    for built in (after, from_capture):
        for one, other in zip(traces(before), traces(built), strict=True):
            assert (one.routing is None) == (other.routing is None)
            if one.routing is not None and other.routing is not None:
                assert one.routing.tolist() == other.routing.tolist()


@given(routed_sessions())
def test_packed_tokens_keep_their_experts(completions: list[Completion]) -> None:
    found = traces(PrefixMerging(PrefixMerging.Options()).build(grow(completions)))
    rows = [row(str(at), trace) for at, trace in enumerate(found) if len(trace.prompt_ids)]
    for pack in (pack_trees, pack_sequences):
        for batch in pack(rows, 10_000).batches:
            routing = batch.padded(len(batch) + 3).routing
            assert routing is None or len(routing) == len(batch) + 3
            for name in batch.names:
                mine = rows[[one.name for one in rows].index(name)]
                at = int(batch.terms.targets[batch.terms.rows == batch.names.index(name)][-1])
                for depth in range(int(mine.trained.depths[-1]), -1, -1):
                    told = None if routing is None else routing[at]
                    known = None if mine.routing is None else mine.routing[depth]
                    if known is not None and known.any():
                        assert told is not None
                        assert told.tolist() == known.tolist()
                    else:
                        assert told is None or not told.any()
                    at = int(batch.predecessors[at])


def test_experts_are_kept_in_as_few_bytes_as_hold_them() -> None:
    ids = list(range(1, 200))
    wide = routing_of(ids).astype(np.uint16) + np.uint16(300)
    for told in (routing_of(ids), wide):
        one = replace(completion(0, ids[:100], ids[100:]), routing=told)
        (kept,) = recording.decode(encoded([one])).completions
        assert kept.routing is not None
        assert kept.routing.dtype == told.dtype
        assert kept.routing.tolist() == told.tolist()


def test_experts_with_high_numbers_are_told_of_a_turn_with_low_ones() -> None:
    """Each answer is kept in as few bytes as hold it; its last token is told of by the next one."""
    first = replace(completion(0, [1, 2], [3, 4]), routing=routing_of([1, 2, 3, 4]))
    more = [1, 2, 3, 4, 5, 6]
    high = routing_of(more, 3).astype(np.uint16) + np.uint16(300)
    then = replace(completion(1, more[:5], more[5:], parent="c0"), routing=high)
    (trace,) = traces(PrefixMerging(PrefixMerging.Options()).build(parse_capture(captured([first, then]))))
    assert trace.routing is not None
    assert trace.routing[3:5].tolist() == high.tolist()


@given(sessions())
def test_a_recording_without_experts_says_nothing_of_them(completions: list[Completion]) -> None:
    data = encoded(completions)
    body = data[data.index(b"\n", len(recording.MAGIC)) + 1 :]
    assert b'"routing"' not in zstandard.decompress(body)
    for part in frames(captured(completions)):
        assert part.payload is not None
        document: dict[str, Any] = opened(part.payload)[0]
        assert "routing" not in document
