"""The gateway against going direct and against its peers: throughput, added latency, streams, sessions.

Every process has the same two cores: the load generator, what is measured, and a double of the engine
that answers from bytes made beforehand. Load generator and double speak HTTP on bare sockets and so
are several times faster than anything in between; what a program can get out of going direct is
measured with an everyday HTTP client (aiohttp) as well, and that is what the goal compares with.

Whatever is visited starts fresh, so that no visit pays for an earlier one, and shows at once all that it can.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from benchmarks.gateway import processes
from benchmarks.gateway.load import Job
from benchmarks.gateway.processes import Target, measured
from benchmarks.gateway.wire import Wire, build, other_harness
from benchmarks.report import Row, at_least, at_most, report

CONCURRENT = 32
GATEWAYS = 2
"""Those of several nodes: as many as the cores that the benchmark is meant for."""
SESSIONS = 100
STREAMS = 1_000
MANY_SESSIONS = (10, 100, 1_000)
FLAT = 0.9
"""The least share of its throughput with few that the gateway keeps at any number of sessions."""
FIRST_TOKEN_SECONDS = 0.01
"""How long the double waits before the first token, so that everything before it is done by then."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    seconds: float
    requests: int
    rounds: int


THOROUGH = Effort(seconds=2.0, requests=200, rounds=3)
QUICK = Effort(seconds=1.5, requests=100, rounds=1)
WARM_UP = 30
"""Requests at one connection that are not counted."""


class Bench:
    """One wire, one engine double, and a counter so that no request is ever repeated."""

    def __init__(self, wire: Wire, engine: Target, effort: Effort) -> None:
        self.wire = wire
        self.engine = engine
        self.effort = effort
        self._counter = 1
        self._begun = time.monotonic()

    def step(self, what: str) -> None:
        """Say what comes next, and how long it took to get there."""
        print(f"[{time.monotonic() - self._begun:4.0f} s] {what}", file=sys.stderr, flush=True)

    def rate(
        self, target: Target, *, stream: bool = False, sessions: int | None = None, kind: str = "throughput"
    ) -> float:
        """Requests per second with 32 at once."""
        body = _streamed(self.wire.first) if stream else self.wire.first
        job = self._job(kind, target, [body], connections=CONCURRENT, seconds=self.effort.seconds)
        job.sessions[:] = job.sessions[:sessions]
        return float(measured(job)["rate"])

    def milliseconds(self, target: Target, bodies: Sequence[str]) -> list[float]:
        """Of each exchange's last request, one at a time, after some that warm up."""
        job = self._job("latency", target, bodies, requests=self.effort.requests + WARM_UP)
        return [1000 * seconds for seconds in measured(job)["seconds"][WARM_UP:]]

    def first_token_delays(self, target: Target) -> list[float]:
        """Milliseconds from the engine's writing of the first token to the client's reading of it."""
        processes.tell(
            self.engine, "/behaviour", {"first_token_after": FIRST_TOKEN_SECONDS, "stays_open": False}
        )
        processes.tell(self.engine, "/first_tokens")
        requests = self.effort.requests // 2 + WARM_UP
        job = self._job("first_token", target, [_streamed(self.wire.first)], requests=requests)
        moments = measured(job)["moments"]
        written = processes.tell(self.engine, "/first_tokens")
        processes.tell(self.engine, "/behaviour", {"first_token_after": 0.0, "stays_open": False})
        return [1000 * (read - wrote) for wrote, read in zip(written, moments, strict=True)][WARM_UP:]

    def stream_megabytes(self, target: Target) -> float:
        """Resident memory that each of 1,000 open streams adds to a gateway that has served before."""
        before = target.memory()
        processes.tell(self.engine, "/behaviour", {"first_token_after": 0.001, "stays_open": True})
        job = self._job("open", target, [_streamed(self.wire.first)], connections=STREAMS)
        with processes.streams_open(job):
            added = target.memory() - before
            processes.tell(self.engine, "/behaviour", {"first_token_after": 0.0, "stays_open": False})
        return added / STREAMS / 2**20

    def first_renders(self, target: Target) -> tuple[float, float]:
        """Milliseconds of the first session's first request and of a late session's, the same harness."""
        warm = self._job("latency", target, [other_harness(self.wire.first)], requests=WARM_UP)
        measured(warm)
        job = self._job("latency", target, [self.wire.first], requests=len(target.sessions))
        seconds = measured(job)["seconds"]
        return 1000 * seconds[0], 1000 * statistics.median(seconds[-20:])

    def _job(
        self,
        kind: str,
        target: Target,
        bodies: Sequence[str],
        connections: int = 1,
        seconds: float = 0.0,
        requests: int = 0,
    ) -> Job:
        self._counter += 10_000_000
        return Job(
            kind=kind,
            ports=list(target.ports),
            sessions=list(target.sessions),
            bodies=list(bodies),
            counter=self._counter,
            connections=connections,
            seconds=seconds,
            requests=requests,
            marker=self.wire.marker.decode(),
        )


def _streamed(body: str) -> str:
    return body[:-1] + ', "stream": true, "stream_options": {"include_usage": true}}'


def throughput(bench: Bench) -> Iterator[Row]:
    """Rounds of all alternate, so that a noisy minute hits everyone; each one's median counts."""
    engine, rounds = bench.engine, bench.effort.rounds
    starts: dict[str, Callable[[], AbstractContextManager[Target]]] = {
        "direct": lambda: nullcontext(engine),
        "chat": lambda: processes.polar("chat", engine, SESSIONS),
        "chat x 2": lambda: processes.polar("chat", engine, SESSIONS, GATEWAYS),
        "tokens x 2": lambda: processes.polar("tokens", engine, SESSIONS, GATEWAYS),
        "rllm": lambda: processes.rllm(engine, SESSIONS),
        "litellm": lambda: processes.litellm(engine),
    }
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(1, rounds + 1):
        for name, start in starts.items():
            bench.step(f"throughput, round {number} of {rounds}: {name}")
            with start() as target:
                for how, rate in _rates(bench, target, name):
                    seen[name, how].append(rate)
    usual = {what: statistics.median(rates) for what, rates in seen.items()}
    one, two = (usual[name, "whole"] for name in ("chat", "chat x 2"))
    direct = usual["direct", "everyday"]
    yield at_least(
        "chat mode, 2 gateways, everyday client (peer: direct)",
        *(usual["chat x 2", "everyday"], "req/s", 0.2, direct),
    )
    yield at_least("chat mode, 2 gateways (peer: rllm)", two, "req/s", 10, usual["rllm", "whole"])
    yield at_least("chat mode, 2 gateways (peer: litellm)", two, "req/s", 30, usual["litellm", "whole"])
    yield Row(
        "chat mode, 1 gateway, everyday client (peer: direct)", usual["chat", "everyday"], "req/s", direct
    )
    for peer in ("rllm", "litellm", "direct"):
        yield Row(f"chat mode, 1 gateway (peer: {peer})", one, "req/s", usual[peer, "whole"])
    for peer in ("rllm", "litellm", "direct"):
        yield Row(
            f"chat mode, 2 gateways, streams (peer: {peer})",
            *(usual["chat x 2", "stream"], "req/s", usual[peer, "stream"]),
        )
    yield Row(
        "tokens mode, 2 gateways (peer: rllm)", usual["tokens x 2", "whole"], "req/s", usual["rllm", "whole"]
    )
    yield Row(
        "tokens mode, 2 gateways, streams (peer: rllm)",
        *(usual["tokens x 2", "stream"], "req/s", usual["rllm", "stream"]),
    )


def _rates(bench: Bench, target: Target, name: str) -> Iterator[tuple[str, float]]:
    """Those that a row shows."""
    yield "whole", bench.rate(target)
    if name != "chat":
        yield "stream", bench.rate(target, stream=True)
    if name in ("direct", "chat", "chat x 2"):
        yield "everyday", bench.rate(target, kind="everyday")


def latency(bench: Bench) -> Iterator[Row]:
    """What a gateway adds to one request at a time: to the whole of it, and to a stream's first token.

    Rounds of all alternate here too, and each one's best counts: the one with the lowest median.
    """
    engine, rounds = bench.engine, bench.effort.rounds
    exchanges = {"first": [bench.wire.first], "second": [bench.wire.first, bench.wire.second]}
    visits: dict[str, tuple[Callable[[], AbstractContextManager[Target]], Sequence[str]]] = {
        "direct": (lambda: nullcontext(engine), ("first", "second", "token")),
        "chat": (lambda: processes.polar("chat", engine, SESSIONS), ("first", "token")),
        "tokens": (lambda: processes.polar("tokens", engine, SESSIONS), ("second", "token")),
        "rllm": (lambda: processes.rllm(engine, SESSIONS), ("first",)),
        "litellm": (lambda: processes.litellm(engine), ("first",)),
    }
    best: dict[tuple[str, str], list[float]] = {}
    for number in range(1, rounds + 1):
        for name, (start, asked) in visits.items():
            bench.step(f"latency, round {number} of {rounds}: {name}")
            with start() as target:
                for what in asked:
                    if what == "token":
                        found = bench.first_token_delays(target)
                    else:
                        found = bench.milliseconds(target, exchanges[what])
                    best[name, what] = min(best.get((name, what), found), found, key=statistics.median)
    chat, rllm, litellm = (
        _added(best[name, "first"], best["direct", "first"]) for name in ("chat", "rllm", "litellm")
    )
    tokens = _added(best["tokens", "second"], best["direct", "second"])
    yield at_most("added latency, chat mode, p50 (peer: rllm)", chat[0], "ms", 1.5, rllm[0])
    yield Row("added latency, chat mode, p95 (peer: rllm)", chat[1], "ms", rllm[1])
    yield Row("added latency, chat mode, p50 (peer: litellm)", chat[0], "ms", litellm[0])
    yield at_most("added latency, tokens mode, extending turn, p50", tokens[0], "ms", 4)
    yield Row("added latency, tokens mode, extending turn, p95", tokens[1], "ms")
    for mode in ("chat", "tokens"):
        name = f"engine's first token to client, {mode} mode"
        p50, direct = (statistics.median(best[who, "token"]) for who in (mode, "direct"))
        yield at_most(f"{name}, p50 (peer: direct)", p50, "ms", 5, direct)
        yield Row(f"{name}, p95", _p95(best[mode, "token"]), "ms")


def sessions(bench: Bench) -> Iterator[Row]:
    """One process with 1,000 sessions: whether it slows down, what it shares, and 1,000 open streams."""
    fewest, *more = MANY_SESSIONS
    seen: dict[int, list[float]] = defaultdict(list)
    memory = {}
    bench.step("sessions: throughput with 10, 100 and 1,000, and 1,000 streams, chat mode")
    with processes.polar("chat", bench.engine, max(MANY_SESSIONS)) as target:
        for _ in range(2 * bench.effort.rounds - 1):
            for count in MANY_SESSIONS:
                seen[count].append(bench.rate(target, sessions=count))
        memory["chat"] = bench.stream_megabytes(target)
    bench.step("sessions: first requests of 1,000, and 1,000 streams, tokens mode")
    with processes.polar("tokens", bench.engine, max(MANY_SESSIONS)) as target:
        first, late = bench.first_renders(target)
        memory["tokens"] = bench.stream_megabytes(target)
    rates = {count: statistics.median(found) for count, found in seen.items()}
    for mode, megabytes in memory.items():
        yield at_most(f"each of 1,000 open streams, {mode} mode", megabytes, "MB", 1)
    yield Row(f"chat mode, {fewest} sessions", rates[fewest], "req/s")
    for count in more:
        yield at_least(
            f"chat mode, {count:,} sessions (peer: {fewest})", rates[count], "req/s", FLAT, rates[fewest]
        )
    yield at_most(
        "first request of the 1,000th session, tokens mode (peer: of the 1st)",
        late,
        "ms",
        round(first, 1),
        first,
    )


def _added(through: list[float], direct: list[float]) -> tuple[float, float]:
    return statistics.median(through) - statistics.median(direct), _p95(through) - _p95(direct)


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


PARTS = {part.__name__: part for part in (throughput, latency, sessions)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="measure less of everything; nothing is kept")
    parser.add_argument("--only", choices=sorted(PARTS), help="one part; nothing is kept")
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wire = build()
    rows: list[Row] = []
    with processes.engine_double(wire) as engine:
        bench = Bench(wire, engine, QUICK if asked.quick else THOROUGH)
        for name, part in PARTS.items():
            if asked.only in (None, name):
                rows += part(bench)
        bench.step("done")
    report("gateway", rows, is_whole=not asked.quick and asked.only is None)


if __name__ == "__main__":
    main()
