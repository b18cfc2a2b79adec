"""What goes wrong, when and for how long: all of it follows from a seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.faults.link import Condition, Link
from tests.faults.place import Place

MEGABYTE = bytes(1 << 20)
HOUR = 3600.0


class Fault(StrEnum):
    """What can happen."""

    SERVER_KILLED = "server killed"
    NODE_KILLED = "node killed"
    ENGINE_KILLED = "engine killed"
    DATABASE_KILLED = "database killed"
    LINK_CUT = "link cut"
    LINK_SLOW = "link slow"
    LINK_FROZEN = "link half open"
    REQUESTS_REPEATED = "requests repeated"
    DISK_FULL = "disk full"
    CLOCK_JUMPS = "clock jumps"


CONDITIONS = {
    Fault.LINK_CUT: Condition.CUT,
    Fault.LINK_SLOW: Condition.SLOW,
    Fault.LINK_FROZEN: Condition.FROZEN,
    Fault.REQUESTS_REPEATED: Condition.REPEATING,
}


@dataclass(frozen=True)
class Planned:
    """One fault of a plan."""

    after: float
    """Seconds since the one before began; faults overlap."""
    fault: Fault
    target: int
    """Which of the parts, links or disks that it can happen to, counted round."""
    seconds: float

    def __str__(self) -> str:
        return f"+{self.after:.1f}s {self.fault} ({self.target}) for {self.seconds:.1f}s"


def plan(seed: int, count: int, possible: Sequence[Fault]) -> list[Planned]:
    """So many faults; each kind comes up before any comes again."""
    chance = random.Random(seed)
    kinds: list[Fault] = []
    while len(kinds) < count:
        kinds += chance.sample(possible, len(possible))
    return [
        Planned(chance.uniform(0.5, 2.0), kind, chance.randrange(12), chance.uniform(0.2, 2.0))
        for kind in kinds[:count]
    ]


class Mischief:
    """Does to a place what a plan says."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._busy: dict[object, asyncio.Lock] = {}
        self.done: Counter[Fault] = Counter()

    @property
    def possible(self) -> list[Fault]:
        left_out = set()
        if self._place.database is None:
            left_out.add(Fault.DATABASE_KILLED)
        if not self._place.disks:
            left_out.add(Fault.DISK_FULL)
        return [fault for fault in Fault if fault not in left_out]

    async def follow(self, planned: Sequence[Planned], is_over: Callable[[], bool]) -> None:
        """Until the plan ends, or there is nothing left to disturb."""
        async with asyncio.TaskGroup() as group:
            for one in planned:
                await asyncio.sleep(one.after)
                if is_over():
                    return
                group.create_task(self._happen(one))

    async def _happen(self, one: Planned) -> None:
        place, number, seconds = self._place, one.target, one.seconds
        match one.fault:
            case Fault.SERVER_KILLED:
                part = place.servers[number % len(place.servers)]
                await self._alone(part, one.fault, part.killed(seconds))
            case Fault.NODE_KILLED:
                part = place.nodes[number % len(place.nodes)]
                await self._alone(part, one.fault, part.killed(seconds))
            case Fault.ENGINE_KILLED:
                await self._alone(place.engine, one.fault, place.engine.killed(seconds))
            case Fault.DATABASE_KILLED:
                assert place.database is not None
                await self._alone(place.database, one.fault, place.database.killed(seconds))
            case Fault.LINK_CUT | Fault.LINK_SLOW | Fault.LINK_FROZEN:
                links = [*place.to_servers, place.to_engine]
                links += [place.to_database] if place.to_database is not None else []
                link = links[number % len(links)]
                await self._alone(link, one.fault, _bad(link, CONDITIONS[one.fault], seconds))
            case Fault.REQUESTS_REPEATED:
                link = place.to_servers[number % len(place.to_servers)]
                await self._alone(link, one.fault, _bad(link, CONDITIONS[one.fault], seconds))
            case Fault.DISK_FULL:
                disk = place.disks[number % len(place.disks)]
                await self._alone(disk, one.fault, _full(disk, seconds))
            case Fault.CLOCK_JUMPS:
                # For good: it is the next jump that brings it back.
                server = number % len(place.servers)
                place.set_clock(server, (number % 3 - 1) * HOUR)
                self.done[one.fault] += 1

    async def _alone(self, target: object, fault: Fault, work: Awaitable[None]) -> None:
        """One thing at a time to the same target."""
        async with self._busy.setdefault(target, asyncio.Lock()):
            await work
            self.done[fault] += 1


async def _bad(link: Link, condition: Condition, seconds: float) -> None:
    link.become(condition)
    try:
        await asyncio.sleep(seconds)
    finally:
        link.become(Condition.CLEAR)


async def _full(disk: Path, seconds: float) -> None:
    filler = disk / "filler"
    try:
        await asyncio.to_thread(_fill, filler)
        await asyncio.sleep(seconds)
    finally:
        filler.unlink(missing_ok=True)


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(MEGABYTE)
        except OSError:
            return
