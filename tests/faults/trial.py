"""Sessions rolled out while everything fails around them, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from polar.app.verification import verify
from polar.client import AsyncClient
from polar.errors import Unavailable
from polar.models.session import SessionResult, SessionStatus
from polar.models.task import TaskStatus
from polar.models.views import TaskView
from polar.recordings import recording
from polar.recordings.recording import Recording
from polar.runtimes.disk import mounts_below
from tests.faults.engine import QUESTION, tokens_of
from tests.faults.mischief import Fault, Mischief, plan
from tests.faults.place import LEASE_SECONDS, Place, place, processes_below
from tests.faults.unended import describe_unended
from tests.systems import TOKEN, shell_task
from tests.waiting import eventually, succeeds

T = TypeVar("T")

SAMPLES = 10
AGAIN_SECONDS = 0.2
"""Between two questions to a server that does not answer."""
START_SECONDS = 120.0
QUEUED_AGAIN_SECONDS = 3 * LEASE_SECONDS
"""Within which a server that has just started queues what silent nodes hold: it gives them one lease to
renew, ends what is left after one more, and looks for it three times a lease."""
STALL_SECONDS = 4 * QUEUED_AGAIN_SECONDS
"""How long, once nothing fails any more, no session at all may end; also on a machine that is busy."""

TURNS = 3
AGENT = f"""sleep 0.5
{sys.executable} -IS - <<'PY'
import json, os, socket, time
host, port = os.environ["POLAR_GATEWAY_URL"].partition("//")[2].split(":")
messages = [{{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}}]
for turn in range({TURNS}):
    body = json.dumps({{"model": os.environ["POLAR_MODEL"], "messages": messages}})
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: gateway", "Connection: close",
            "Authorization: Bearer " + os.environ["POLAR_KEY"], "Content-Type: application/json",
            "Content-Length: " + str(len(body))]
    answer = b""
    while not answer.startswith(b"HTTP/1.1 200"):
        time.sleep(0.05 if not answer else 0.5)
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(("\\r\\n".join(head) + "\\r\\n\\r\\n" + body).encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    said = json.loads(answer.partition(b"\\r\\n\\r\\n")[2])["choices"][0]["message"]["content"]
    messages += [{{"role": "assistant", "content": said}}, {{"role": "user", "content": f"And {{turn}}?"}}]
    time.sleep(0.5)
open("answer.txt", "w").write(said)
PY
"""
"""A shell agent that takes its time, so that much can go wrong, and makes a few model calls, each repeated as
a provider's SDK would until it is answered. It works longer after each of them than sending it to the server
takes: without that, a killed node also loses what was answered in its last moment."""


class Consumer:
    """A trainer that keeps what it has taken together with its cursor, and crashes between the two."""

    def __init__(self, place: Place, seed: int) -> None:
        self._place = place
        self._chance = random.Random(seed)
        self._cursor = 0
        self.taken: list[SessionResult] = []
        self.crashes = 0
        self.begun = asyncio.Event()
        """Set once there is a result."""

    async def take(self, count: int) -> None:
        """Until there are so many results."""

        async def has_all() -> bool:
            with suppress(Unavailable):
                await self._take_some()
            return len(self.taken) >= count

        await eventually(has_all, math.inf, every=AGAIN_SECONDS)

    async def _take_some(self) -> None:
        """Those that are there, until a crash."""
        async with client(self._place, self._chance.randrange(4)) as server:
            async for page in server.result_pages(cursor=self._cursor):
                if page.results and self._chance.random() < 0.2:
                    self.crashes += 1
                    break
                self.taken += page.results
                self._cursor = page.cursor
                if self.taken:
                    self.begun.set()

    async def until_taken(self, taking: asyncio.Task[None]) -> None:
        """Until all have come, as long as some come."""
        while not taking.done():
            before = len(self.taken)
            await asyncio.wait({taking}, timeout=STALL_SECONDS)
            if not taking.done() and len(self.taken) == before:
                left = await describe_unended(self._place.stored_at)
                raise AssertionError(f"no session ended in {STALL_SECONDS:g} s\n{left}")
        taking.result()


async def trial(
    directory: Path,
    *,
    seed: int,
    sessions: int,
    faults: int,
    servers: int,
    nodes: int,
    on_postgres: bool,
    kinds: Collection[Fault] = tuple(Fault),
) -> Counter[Fault]:
    """What was done to the system that passed; AssertionError if it did not."""
    print(f"seed {seed}")
    async with place(directory, servers=servers, nodes=nodes, on_postgres=on_postgres) as running:
        mischief = Mischief(running)
        planned = plan(seed, faults, [fault for fault in mischief.possible if fault in kinds])
        print(*planned, sep="\n")
        consumer = Consumer(running, seed)
        taking = asyncio.create_task(consumer.take(sessions))
        submitting = asyncio.create_task(_submit(running, sessions // SAMPLES))
        try:
            await asyncio.wait_for(consumer.begun.wait(), START_SECONDS)
            await mischief.follow(planned, taking.done)
            await submitting
            await consumer.until_taken(taking)
        finally:
            taking.cancel()
            submitting.cancel()
            print(f"{len(consumer.taken)} results, {consumer.crashes} crashes of their reader")
            print(", ".join(f"{count} × {fault}" for fault, count in mischief.done.items()))
        await _assert_ended_once(running, consumer.taken, sessions)
        losses = await _losses(running, consumer.taken)
        print(losses)
        if set(kinds) == {Fault.NODE_KILLED}:
            assert len(losses.lost) <= losses.broken_off, "more was lost than the calls in flight"
        await _assert_nothing_left(running)
    return mischief.done


def client(running: Place, number: int) -> AsyncClient:
    return AsyncClient(running.url(number), TOKEN, timeout=5.0)


async def _submit(running: Place, tasks: int) -> None:
    async with client(running, 0) as one, client(running, 1) as other:
        for number in range(tasks):
            task = shell_task(f"t{number}", AGENT, instruction=QUESTION, samples=SAMPLES, runtime="process")
            server = one if number % 2 else other
            await _acknowledged(partial(server.submit, task))


async def _acknowledged(call: Callable[[], Awaitable[T]]) -> T:
    return await succeeds(call, Unavailable, seconds=STALL_SECONDS, every=AGAIN_SECONDS)


async def _assert_ended_once(running: Place, taken: list[SessionResult], sessions: int) -> None:
    expected = {f"t{task}.{sample}" for task in range(sessions // SAMPLES) for sample in range(SAMPLES)}
    times = Counter(result.session_id for result in taken)
    assert not [id for id, count in times.items() if count > 1], "taken twice"
    assert times.keys() == expected
    async with client(running, 0) as server:
        views = await _acknowledged(partial(_listed, server))
        assert {view.status for view in views} == {TaskStatus.FINISHED}
        for result in taken:
            if result.has_recording:
                found = await verify(result.session_id, await _recording(server, result), None, None, print)
                assert not found.problems, (result, found.problems)
    failed = Counter(result.error for result in taken if result.status is not SessionStatus.COMPLETED)
    print(f"attempts: {dict(Counter(result.attempt for result in taken))}; failed: {dict(failed)}")
    assert all(result.reward == 1.0 for result in taken if result.status is SessionStatus.COMPLETED)


async def _recording(server: AsyncClient, result: SessionResult) -> Recording:
    return recording.decode(await _acknowledged(partial(server.recording, result.session_id)))


@dataclass(frozen=True)
class Losses:
    """What became of the answers that the engine gave."""

    sampled: int
    lost: frozenset[str]
    """Answers that are in no recording."""
    given_again: int
    """How often an answer was given again instead of being sampled."""
    broken_off: int
    """Agents at work, each with one model call at a time, whose node fell silent."""

    def __str__(self) -> str:
        tokens = sum(map(tokens_of, self.lost))
        return (
            f"{self.sampled} answers sampled, {len(self.lost)} of them ({tokens} tokens) lost;"
            f" {self.broken_off} agents lost their node, {self.given_again} answers were given again"
        )


async def _losses(running: Place, taken: list[SessionResult]) -> Losses:
    """Compare what was sampled with what was recorded; AssertionError for an answer in two places."""
    recorded: Counter[str] = Counter()
    broken_off = 0
    async with client(running, 0) as server:
        for result in taken:
            if result.has_recording:
                whole = (await _recording(server, result)).completions
                recorded.update(it.response.content for it in whole if it.sampled_tokens)
            changes = await _acknowledged(partial(server.session_events, result.session_id))
            broken_off += sum(
                before.status is SessionStatus.RUNNING and after.detail == "its node fell silent"
                for before, after in pairwise(changes)
            )
    sampled = running.sampled
    assert not [answer for answer, count in recorded.items() if count > 1], "recorded twice"
    given_again = sum(result.replay.calls for result in taken if result.replay is not None)
    return Losses(len(sampled), frozenset(sampled) - recorded.keys(), given_again, broken_off)


async def _listed(server: AsyncClient) -> list[TaskView]:
    return [view async for view in server.tasks()]


async def _assert_nothing_left(running: Place) -> None:
    codes = await asyncio.gather(*(node.stop(kindly=True) for node in running.nodes))
    assert all(code in (0, 143) for code in codes), codes
    for part in (*running.servers, running.engine):
        await part.stop(kindly=True)
    left = processes_below(running.directory)
    assert not left, [process.cmdline() for process in left]
    sandboxes = list(running.directory.glob("node-*/nodes/*/sessions/*/workspace"))
    assert not sandboxes, sandboxes
    mounted = set(mounts_below(running.directory)) - set(running.disks)
    assert not mounted, mounted
