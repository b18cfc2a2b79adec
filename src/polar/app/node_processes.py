"""Several nodes on one machine, each a process with its own gateway, to use several cores."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from polar.config.settings import Settings
from polar.errors import Backoff, Unavailable
from polar.models.session import SessionStatus
from polar.node.pools import FEWEST_RUN_SLOTS, places

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "polar", "node", "--config", "-", "--exit-with-parent")
"""Settings go to standard input: other processes of this user could read arguments and environment."""
READY = "ready as "
"""Begins the line with which `polar node` reports that it takes sessions."""
RESTARTS = Backoff(1.0, 60.0)
"""The pauses between restarts; a node that ran longer than the longest pause begins again with the first."""
STOP_SECONDS = 10.0
"""Seconds a node may take to stop after its agents have ended."""
LAST_LINES_SECONDS = 1.0


class NodeProcesses:
    """Runs like one `Node`, until drained or cancelled, restarting nodes that die."""

    def __init__(self, settings: Settings, say: Callable[[str], None], *, pin: Path | None = None) -> None:
        """Pin the certificate of the server, if it is this process's own."""
        self._nodes = [
            NodeProcess(_settings_of_node(settings, number), say, pin)
            for number in range(1, settings.node.count + 1)
        ]
        self._draining = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Return when all are ready; raise PolarError if one cannot start."""
        try:
            async with asyncio.TaskGroup() as starting:
                for node in self._nodes:
                    starting.create_task(node.start())
        except ExceptionGroup as failures:
            await self._stop()
            raise failures.exceptions[0] from None
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for node in self._nodes:
                group.create_task(self._keep_running(node))

    def drain(self) -> None:
        """Take no more work; `run` returns when all nodes have stopped."""
        self._draining.set()
        for node in self._nodes:
            node.terminate()

    async def _keep_running(self, node: NodeProcess) -> None:
        failures = 0
        while True:
            ready_at = time.monotonic()
            code = await node.ended()
            if self._draining.is_set():
                return
            ran_long = time.monotonic() - ready_at > RESTARTS.longest_seconds
            failures = 1 if ran_long else failures + 1
            pause = RESTARTS.pause(failures)
            log.error(
                "node %s exited with code %d, restarting in %.1f s; its sessions are retried when their"
                " leases expire",
                *(node.name, code, pause),
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), pause)
                return
            try:
                await node.start()
            except Unavailable:
                continue  # The node has logged why it stopped.
            except OSError as error:
                log.error("cannot start node %s: %s", node.name, error)
            if self._draining.is_set():
                node.terminate()

    async def _stop(self) -> None:
        await asyncio.gather(*(node.stop() for node in self._nodes))


class NodeProcess:
    def __init__(self, settings: Settings, say: Callable[[str], None], pin: Path | None) -> None:
        self.name = settings.node.name
        self._settings = settings
        self._say = say
        self._pin = pin
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when the node is ready; raise Unavailable if it stops before that."""
        self._process = process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *(("--pin", str(self._pin)) if self._pin else ()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._settings.model_dump_json(exclude_unset=True).encode())
        process.stdin.close()
        ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read(process.stdout, ready))
        waits = [asyncio.create_task(ready.wait()), asyncio.create_task(process.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not ready.is_set():
            raise Unavailable(
                f"node {self.name} failed to start (exit code {process.returncode})",
                hint="see its output above",
            )

    async def ended(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    def terminate(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    async def stop(self) -> None:
        """Stop the node, waiting for its agents as configured."""
        if self._process is None:
            return
        self.terminate()
        try:
            async with asyncio.timeout(self._settings.node.drain_seconds + STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            # A process that the node left may still hold its output open.
            await asyncio.wait({self._reading}, timeout=LAST_LINES_SECONDS)
            self._reading.cancel()

    async def _read(self, lines: asyncio.StreamReader, ready: asyncio.Event) -> None:
        async for line in lines:
            said = line.decode(errors="replace").rstrip()
            self._say(f"{self.name}: {said}")
            if said.startswith(READY):
                ready.set()


def _settings_of_node(settings: Settings, number: int) -> Settings:
    """Return the settings of one of several nodes: its own name and ports, and its share of the machine."""
    node, gateway, telemetry = settings.node, settings.gateway, settings.telemetry
    share = max(FEWEST_RUN_SLOTS, places(node)[SessionStatus.RUNNING] // node.count)
    sections = {"node": {"name": f"{node.name}-{number}", "count": 1, "run_slots": node.run_slots or share}}
    if gateway.port:
        sections["gateway"] = {"port": gateway.port + number - 1}
    if telemetry.metrics_port:
        sections["telemetry"] = {"metrics_port": telemetry.metrics_port + number - 1}
    return settings.updated(**sections).model_copy(update={"data_dir": settings.data_dir.absolute()})
