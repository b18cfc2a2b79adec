"""Several gateways in processes of their own: each session is served by one of them, from first to last.

The gateways share nothing, so that they need not agree on anything; the node alone talks to each, over a
line of its own. One that ends takes its open sessions with it and is started again at the same address;
one that hangs is ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from polar.config.settings import Settings
from polar.engines.base import WeightUpdate
from polar.errors import Conflict, NotFound, PolarError
from polar.gateway.gateways import Address, Gateways
from polar.gateway.line import GatewayEnded, Line, ended
from polar.gateway.session import SessionGrant
from polar.models.policy import PauseMode
from polar.models.session import Progress

log = logging.getLogger(__name__)

START_SECONDS = 120.0
STOP_SECONDS = 5.0
PROGRESS_SECONDS = 1.0
"""How old the progress of open sessions may be that heartbeats tell."""
SILENCE_SECONDS = 60.0
"""How long a process may leave a question unanswered before it is taken to hang."""
FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0
REMEMBERED = 1_000
"""How many sessions' last progress is kept."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a gateway process is to serve."""

    settings: Settings
    """`engine.url` names engines that were found fit; `gateway.port` is this process's own."""
    tokenizer: str | None
    """The model whose renderer is used; None: chat mode."""


class _Worker:
    """One place for a gateway process, the line to the one that runs, and whose gateway it is."""

    def __init__(self, number: int, port: int) -> None:
        self.number = number
        self.port = port
        """Once it has one, it keeps it: sandboxes are told before their session opens."""
        self.placed: set[str] = set()
        self.open: set[str] = set()
        self.lost: set[str] = set()
        """Sessions that were open when the process ended, until they are closed."""
        self.is_up = asyncio.Event()
        self._line: Line | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def line(self) -> Line:
        if self._line is None:
            raise GatewayEnded(f"gateway process {self.number} has not been started")
        return self._line

    async def start(self, assignment: Assignment) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "polar.gateway.worker", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._line = Line(*await asyncio.open_connection(sock=ours), self._lose)
        try:
            async with asyncio.timeout(START_SECONDS):
                self.port = await self.line.call("start", assignment)
        except TimeoutError:
            raise GatewayEnded(f"a gateway process was not up after {START_SECONDS:g} s") from None

    async def stop(self) -> int | None:
        """Its exit code, if there was one to stop; without the line it ends by itself."""
        self.is_up.clear()
        if self._line is not None:
            self._line.close()
        if self._process is None:
            return None
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _lose(self) -> None:
        self.is_up.clear()
        self.lost |= self.open
        self.open.clear()


class GatewayPool(Gateways):
    """As many gateway processes as the settings say, all in front of the same engines."""

    def __init__(self, assignment: Assignment, workers: int) -> None:
        self._assignment = assignment
        port = assignment.settings.gateway.port
        self._workers = [_Worker(number, port + number if port else 0) for number in range(workers)]
        self._homes: dict[str, _Worker] = {}
        self._progress: OrderedDict[str, Progress] = OrderedDict()
        self._ordering = asyncio.Lock()
        """One order goes to all at a time; a process that is started anew is brought up between two."""
        self._pause: PauseMode | None = None
        self._update: WeightUpdate | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[GatewayPool]:
        """All processes up while the block runs; what one of them cannot start for ends it."""
        keeping: list[asyncio.Task[None]] = []
        try:
            await self._start_all()
            keeping = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
            yield self
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await asyncio.gather(*(worker.stop() for worker in self._workers))

    @contextmanager
    def placed(self, session_id: str) -> Iterator[Address]:
        """With the gateway that has the fewest sessions."""
        if session_id in self._homes:
            raise Conflict(f"session {session_id} has a gateway already")
        worker = min(self._workers, key=lambda worker: (not worker.is_up.is_set(), len(worker.placed)))
        worker.placed.add(session_id)
        self._homes[session_id] = worker
        try:
            yield Address(self._assignment.settings.gateway.host, worker.port)
        finally:
            del self._homes[session_id]
            for sessions in (worker.placed, worker.open, worker.lost):
                sessions.discard(session_id)

    async def open_session(self, grant: SessionGrant) -> None:
        worker = self._home(grant.session_id)
        try:
            async with asyncio.timeout(START_SECONDS):
                while True:
                    await worker.is_up.wait()
                    # One that ends just now has not opened it, and the next one may.
                    with suppress(GatewayEnded):
                        await worker.line.call("open_session", grant)
                        worker.open.add(grant.session_id)
                        return
        except TimeoutError:
            raise GatewayEnded(
                f"gateway process {worker.number} has ended and is not up again",
                hint="the node's log says why",
            ) from None

    def progress(self, session_id: str) -> Progress:
        return self._progress.get(session_id, Progress())

    async def budget_spent(self, session_id: str) -> bool:
        worker = self._home(session_id)
        if session_id in worker.lost:
            raise ended()
        is_time: bool = await worker.line.call("budget_spent", session_id)
        return is_time

    async def close_session(self, session_id: str) -> None:
        """GatewayEnded if the session's gateway ended before it: what it would have sampled is not there."""
        worker = self._home(session_id)
        if session_id in worker.lost:
            raise ended()
        if session_id not in worker.open:
            return
        await worker.line.call("close_session", session_id)
        worker.open.discard(session_id)
        self._learn({session_id: await worker.line.call("progress", session_id)})

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    async def pause(self, mode: PauseMode) -> None:
        async with self._ordering:
            self._pause = mode
            try:
                await self._all("pause", mode)
            except BaseException:
                self._pause = None
                with suppress(PolarError):
                    await self._all("resume")
                raise

    async def resume(self) -> None:
        async with self._ordering:
            await self._all("resume")
            self._pause = None

    async def update_weights(self, update: WeightUpdate) -> None:
        """One after the other: the first has them loaded, the others find that they are there."""
        async with self._ordering:
            if not self._up:
                raise ended()
            first, *others = self._up
            await first.line.call("update_weights", update)
            for worker in others:
                await _told(worker, "expect_version", update.version)
                await _told(worker, "update_weights", update)
            self._update = update

    async def policy_version(self) -> int:
        """Of the weights that the engines sample with; the oldest, while an update goes round."""
        versions = await asyncio.gather(*(worker.line.call("policy_version") for worker in self._up))
        if not versions:
            raise GatewayEnded("no gateway process is up", hint="the node's log says why")
        return min(int(version) for version in versions)

    async def metric_families(self) -> Iterable[Metric]:
        """Those of all processes, each sample with the number of its own."""
        families: dict[str, Metric] = {}
        for worker in self._up:
            with suppress(GatewayEnded):
                for family in await worker.line.call("metric_families"):
                    known = families.setdefault(
                        family.name, Metric(family.name, family.documentation, family.type)
                    )
                    known.samples += [
                        sample._replace(labels={**sample.labels, "worker": str(worker.number)})
                        for sample in family.samples
                    ]
        return families.values()

    def _home(self, session_id: str) -> _Worker:
        worker = self._homes.get(session_id)
        if worker is None:
            raise NotFound(f"session {session_id} has no gateway")
        return worker

    @property
    def _up(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.is_up.is_set()]

    async def _all(self, name: str, *arguments: object) -> None:
        """The same call to every process that is up; raises what the first did, once all are done."""
        calls = (_told(worker, name, *arguments) for worker in self._up)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if result is not None:
                raise result

    async def _start_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as starting:
                for worker in self._workers:
                    starting.create_task(self._start(worker))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def _start(self, worker: _Worker) -> None:
        settings = self._assignment.settings
        gateway = settings.gateway.model_copy(update={"port": worker.port})
        await worker.start(
            Assignment(settings.model_copy(update={"gateway": gateway}), self._assignment.tokenizer)
        )
        async with self._ordering:
            watching = asyncio.create_task(self._watch(worker))
            try:
                await self._bring_up(worker.line)
            finally:
                watching.cancel()
            worker.is_up.set()

    async def _bring_up(self, line: Line) -> None:
        """Let a process that is started late know what the others were told."""
        update, is_behind = self._update, False
        if update is not None:
            await line.call("expect_version", update.version)
            is_behind = await line.call("policy_version") != update.version
        if is_behind or self._pause is not None:
            await line.call("pause", self._pause or PauseMode.KEEP)
        if is_behind:
            await line.call("update_weights", update)
        if is_behind and self._pause is None:
            await line.call("resume")

    async def _keep(self, worker: _Worker) -> None:
        """Watch over one place: learn what its sessions do, and start its process again when it ends."""
        while True:
            await self._watch(worker)
            code = await worker.stop()
            log.error(
                "gateway process %d ended (exit code %s), and %d sessions with it",
                *(worker.number, code, len(worker.lost)),
            )
            await self._start_again(worker)

    async def _watch(self, worker: _Worker) -> None:
        gone = asyncio.create_task(worker.line.gone())
        try:
            while not (await asyncio.wait({gone}, timeout=PROGRESS_SECONDS))[0]:
                with suppress(PolarError):
                    await self._ask_progress(worker)
        finally:
            gone.cancel()

    async def _ask_progress(self, worker: _Worker) -> None:
        """Also where no session is open: a process that does not answer is ended, as if it had died."""
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                self._learn(await worker.line.call("open_progress"))
        except TimeoutError:
            log.error(
                "gateway process %d has not answered for %g s and is killed", worker.number, SILENCE_SECONDS
            )
            worker.kill()

    async def _start_again(self, worker: _Worker) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                await self._start(worker)
                return
            except (PolarError, OSError) as error:
                log.error("gateway process %d does not start: %s", worker.number, error)
                await worker.stop()
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    def _learn(self, progress: dict[str, Progress]) -> None:
        self._progress |= progress
        while len(self._progress) > REMEMBERED:
            self._progress.popitem(last=False)


async def _told(worker: _Worker, name: str, *arguments: object) -> None:
    """One that ends meanwhile hears of it when it is back."""
    with suppress(GatewayEnded):
        await worker.line.call(name, *arguments)
