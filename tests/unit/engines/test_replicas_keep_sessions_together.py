"""A session stays on one replica while that one is up and not overloaded; else it moves, and comes back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.engines.base import EngineDown, EngineError, GenerateRequest, ModelInfo, TokenChunk
from polar.engines.replicas import LIGHT, SKEW, TRIES, Replicas, choice, limit, ranking
from polar.errors import InvalidInput
from polar.models.chat import Sampling
from tests.fakes.switchable_engine import CachingEngine, SwitchableEngine

names = st.sets(st.text("abcdef0123456789:/.", min_size=1, max_size=12), min_size=2, max_size=9)
NAMES = [f"http://engine-{number}:8000" for number in range(4)]


@given(keys=st.lists(st.text(), min_size=1, max_size=20), present=names, extra=st.text(min_size=1))
def test_a_replica_that_goes_moves_only_its_own_sessions(
    keys: list[str], present: set[str], extra: str
) -> None:
    with_extra = present | {extra}
    for key in keys:
        before, after = ranking(key, with_extra), ranking(key, with_extra - {extra})
        assert [name for name in before if name != extra] == after
        if before[0] != extra and after:
            assert before[0] == after[0]


def test_sessions_are_spread_evenly_over_the_replicas() -> None:
    homes = Counter(ranking(f"session-{number}", NAMES)[0] for number in range(4000))
    assert all(900 < homes[name] < 1100 for name in NAMES)


@given(data=st.data(), present=names)
@settings(max_examples=60)
def test_load_stays_within_its_bound_and_spills_only_when_overloaded(
    data: st.DataObject, present: set[str]
) -> None:
    """Whatever requests begin and end, also when they all belong to few sessions."""
    loads = dict.fromkeys(sorted(present), 0)
    sessions = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=150))
    for session in sessions:
        order, bound = ranking(str(session), loads), limit(sum(loads.values()) + 1, len(loads))
        chosen = choice(str(session), loads)
        assert all(loads[passed_by] >= bound for passed_by in order[: order.index(chosen)])
        loads[chosen] += 1
        assert loads[chosen] <= max(LIGHT, SKEW * sum(loads.values()) / len(loads) + 1)
        if data.draw(st.integers(0, 4)) == 0:
            ended = data.draw(st.sampled_from([name for name, load in loads.items() if load]))
            loads[ended] -= 1


@given(data=st.data(), present=names, session=st.text())
def test_a_displaced_session_stays_until_it_overloads_its_replica(
    data: st.DataObject, present: set[str], session: str
) -> None:
    loads = {name: data.draw(st.integers(0, 40)) for name in sorted(present)}
    there = data.draw(st.sampled_from(sorted(present)))
    is_overloaded = loads[there] >= limit(sum(loads.values()) + 1, len(loads))
    chosen = choice(session, loads, there)
    assert chosen == (choice(session, loads) if is_overloaded else there)
    assert choice(session, loads, "a replica that is gone") == choice(session, loads)


async def hit_rate(sessions: Sequence[str], cached: int) -> float:
    """Of 10,000 turns by agents that wait on the model half the time, on replicas with small caches."""
    draw = random.Random(1)
    engines = {name: CachingEngine(cached) for name in NAMES}
    replicas = Replicas(engines)
    open_calls: dict[str, AsyncGenerator[TokenChunk, None]] = {}
    events = [(draw.random(), session) for session in sessions]
    heapify(events)
    calls = 0
    while calls < 10_000:
        now, session = heappop(events)
        if (call := open_calls.pop(session, None)) is not None:
            await call.aclose()
        else:
            open_calls[session] = replicas.generate(ask(session, calls))
            await anext(open_calls[session])
            calls += 1
        heappush(events, (now + draw.expovariate(1), session))
    for call in open_calls.values():
        await call.aclose()
    return sum(engine.hits for engine in engines.values()) / calls


async def test_prefixes_are_found_where_they_were_left() -> None:
    assert await hit_rate([f"session-{number}" for number in range(64)], cached=24) > 0.95


async def test_prefixes_are_found_though_most_sessions_prefer_one_replica() -> None:
    """Pinned, the 48 of them would evict each other from a cache for 24: fewer than half would hit."""
    homes = {f"s{number}": ranking(f"s{number}", NAMES)[0] for number in range(1000)}
    crowd = [session for session, home in homes.items() if home == NAMES[0]][:48]
    others = [session for session, home in homes.items() if home != NAMES[0]][:16]
    assert await hit_rate([*crowd, *others], cached=24) > 0.95


def ask(session: str, number: int = 0) -> GenerateRequest:
    return GenerateRequest(f"{session}-{number}", [1], Sampling(), session=session)


async def ids(replicas: Replicas, session: str) -> list[int]:
    return [id async for chunk in replicas.generate(ask(session)) for id in chunk.ids]


def session_at_home_on(name: str, among: Sequence[str]) -> str:
    return next(f"s{n}" for n in range(1000) if ranking(f"s{n}", among)[0] == name)


@asynccontextmanager
async def replicated(
    *engines: SwitchableEngine, backoff: float = 0.001
) -> AsyncIterator[tuple[Replicas, dict[str, SwitchableEngine]]]:
    named = dict(zip(NAMES, engines, strict=False))
    replicas = Replicas(named, first_backoff_seconds=backoff)
    try:
        yield replicas, named
    finally:
        await replicas.close()
        assert all(engine.closed for engine in engines)


async def test_all_calls_of_a_session_go_to_one_replica() -> None:
    async with replicated(*(SwitchableEngine() for _ in range(4))) as (replicas, named):
        for session in ("a", "b", "c", "d", "e") * 5:
            assert await ids(replicas, session) == [7, 2]
            await asyncio.sleep(0)
        homes = [{name for name, engine in named.items() if s in engine.sessions} for s in "abcde"]
        assert all(len(home) == 1 for home in homes)


async def test_one_busy_session_spills_to_its_second_replica_and_no_further() -> None:
    async with replicated(*(SwitchableEngine() for _ in range(4))) as (replicas, named):
        gate = asyncio.Event()
        for engine in named.values():
            engine.gate = gate
        first, second, *others = ranking("hot", named)
        calls = [replicas.generate(ask("hot", number)) for number in range(LIGHT + 3)]
        for call in calls:
            await anext(call)
        assert (named[first].open, named[second].open) == (LIGHT, 3)
        assert not any(named[other].open for other in others)
        gate.set()
        for call in calls:
            assert [chunk.ids async for chunk in call] == [[2]]
        before = len(named[second].sessions)
        await ids(replicas, "hot")
        assert len(named[second].sessions) == before + 1, "it stays with its latest prefix"


async def test_a_dead_replicas_sessions_move_and_come_back() -> None:
    async with replicated(*(SwitchableEngine() for _ in range(3))) as (replicas, named):
        await replicas.model_info()
        dead = NAMES[0]
        mine, other = session_at_home_on(dead, list(named)), session_at_home_on(NAMES[1], list(named))
        named[dead].is_on = False
        named[dead].probed.clear()
        assert await ids(replicas, mine) == [7, 2]
        assert await ids(replicas, mine) == [7, 2]
        assert await ids(replicas, other) == [7, 2]
        second = ranking(mine, named)[1]
        assert named[second].sessions.count(mine) == 2
        assert named[dead].sessions == [mine], "a replica put aside is not asked again"
        await named[dead].probed.wait()
        named[dead].is_on = True
        await readmitted(replicas, named[dead], mine)
        assert named[dead].sessions == [mine, mine]


async def readmitted(replicas: Replicas, engine: SwitchableEngine, session: str) -> None:
    """Return once the engine is asked for a session of its own again."""
    before = len(engine.sessions)
    async with asyncio.timeout(10):
        while len(engine.sessions) == before:
            assert await ids(replicas, session) == [7, 2]
            await asyncio.sleep(0)


async def test_a_replica_that_returns_with_another_model_stays_aside() -> None:
    async with replicated(SwitchableEngine(), SwitchableEngine()) as (replicas, named):
        await replicas.model_info()
        mine = session_at_home_on(NAMES[0], list(named))
        named[NAMES[0]].is_on = False
        await ids(replicas, mine)
        named[NAMES[0]].info = ModelInfo("large", 512, 0)
        named[NAMES[0]].is_on = True
        for _ in range(2):
            named[NAMES[0]].probed.clear()
            await named[NAMES[0]].probed.wait()
        await ids(replicas, mine)
        assert named[NAMES[0]].sessions == [mine]


async def test_when_all_are_down_each_is_tried_once_and_the_call_fails() -> None:
    async with replicated(*(SwitchableEngine() for _ in range(4)), backoff=60) as (replicas, named):
        for engine in named.values():
            engine.is_on = False
        for _ in range(2):
            with pytest.raises(EngineDown, match="switched off"):
                await ids(replicas, "a")
        assert sum(len(engine.sessions) for engine in named.values()) == 2 * TRIES
        for engine in named.values():
            engine.is_on = True
        assert await ids(replicas, "a") == [7, 2], "none is known to be up, but one is"


async def test_nothing_is_tried_again_after_the_first_token() -> None:
    async with replicated(SwitchableEngine(), SwitchableEngine()) as (replicas, named):
        for engine in named.values():
            engine.breaks_after = 1
        call = replicas.generate(ask("a"))
        assert (await anext(call)).ids == [7]
        with pytest.raises(EngineError, match="after the first token"):
            await anext(call)
        assert sum(len(engine.sessions) for engine in named.values()) == 1


async def test_a_loss_before_the_first_token_is_not_seen_by_the_caller() -> None:
    async with replicated(SwitchableEngine(), SwitchableEngine(), backoff=60) as (replicas, named):
        mine = session_at_home_on(NAMES[0], list(named))
        named[NAMES[0]].breaks_after = 0
        assert await ids(replicas, mine) == [7, 2]


async def test_closing_a_generation_aborts_it_and_frees_its_place() -> None:
    async with replicated(SwitchableEngine(), SwitchableEngine()) as (replicas, named):
        for engine in named.values():
            engine.gate = asyncio.Event()
        for _ in range(LIGHT + 1):
            call = replicas.generate(ask("a"))
            await anext(call)
            assert sum(engine.open for engine in named.values()) == 1
            await call.aclose()
            assert sum(engine.open for engine in named.values()) == 0
        home = ranking("a", named)[0]
        assert len(named[home].sessions) == LIGHT + 1, (
            "a place that stayed taken would send the last one away"
        )


async def test_the_policy_version_passes_through_and_the_oldest_is_told() -> None:
    engines = (SwitchableEngine(policy_version=3), SwitchableEngine(policy_version=2))
    async with replicated(*engines) as (replicas, named):
        assert await replicas.model_info() == ModelInfo("small", 512, 2)
        for name, version in zip(NAMES, (3, 2), strict=False):
            call = replicas.generate(ask(session_at_home_on(name, list(named))))
            assert [chunk.policy_version async for chunk in call] == [version] * 2


@pytest.mark.parametrize("other", [SwitchableEngine("large"), SwitchableEngine(max_context=1024)])
async def test_different_models_are_refused_by_name(other: SwitchableEngine) -> None:
    async with replicated(SwitchableEngine(), other) as (replicas, _):
        with pytest.raises(InvalidInput, match=r"engine-0:8000 serves small.*engine-1:8000 serves"):
            await replicas.model_info()


async def test_different_tokenizers_are_refused() -> None:
    async with replicated(SwitchableEngine(), SwitchableEngine()) as (replicas, named):
        assert await replicas.tokenize("x") == [1, 2]
        named[NAMES[1]].ids = [3]
        with pytest.raises(InvalidInput, match="tokenise differently"):
            await replicas.tokenize("x")


async def test_starting_needs_one_replica_that_is_up_and_none_that_lacks_something() -> None:
    async with replicated(SwitchableEngine(), SwitchableEngine(), backoff=60) as (replicas, named):
        named[NAMES[0]].is_on = False
        assert (await replicas.model_info()).name == "small"
        await replicas.check()
        named[NAMES[1]].lacks = "no logprobs"
        with pytest.raises(EngineError, match="no logprobs"):
            await replicas.check()
        named[NAMES[1]].is_on = False
        with pytest.raises(EngineDown, match="none of the 2 engines can be reached: http://engine-0:8000"):
            await replicas.model_info()


async def test_requests_without_a_session_are_spread() -> None:
    async with replicated(*(SwitchableEngine() for _ in range(4))) as (replicas, named):
        for number in range(60):
            request = GenerateRequest(f"call-{number}", [1], Sampling())
            assert [chunk async for chunk in replicas.generate(request)]
        assert all(len(engine.sessions) > 3 for engine in named.values())
