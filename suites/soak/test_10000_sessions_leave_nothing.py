"""Ten thousand sessions against a mock engine leave nothing behind, and no process larger than it was.

POLAR_SOAK_SESSIONS=1500 runs fewer. Memory is private memory (USS): pages of libraries and files that the
system shares between processes come and go. It is compared with that after the first thousand sessions: by
then whatever is kept up to some number is full, and the garbage collector has run.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from polar.client import AsyncClient
from polar.models.session import SessionStatus
from polar.models.task import TaskSpec
from tests.fakes.answering_engine import answering_engine
from tests.fakes.character_chat import Said
from tests.systems import TOKEN
from tests.waiting import eventually

SESSIONS = int(os.environ.get("POLAR_SOAK_SESSIONS", "10000"))
WARM = min(1_000, SESSIONS // 2)
"""How many sessions make a process as large as it may become."""
WAVE = max(SESSIONS // 10, 20)
SAMPLES = 2
MOST_GROWTH = 1.05
KEPT_CONNECTIONS = 16
"""Kept open for reuse, more or fewer by chance. A descriptor a session would be thousands."""
IDLE_SECONDS = 5.0
"""How long every process must have had nothing to do before it is measured."""

ASK = r"""
address=${POLAR_GATEWAY_URL#http://}
body='{"model":"'$POLAR_MODEL'","messages":[{"role":"user","content":"'$1'"}]}'
exec 3<>"/dev/tcp/${address%:*}/${address##*:}"
printf '%s\r\n' "POST /v1/chat/completions HTTP/1.1" "Host: $address" "Authorization: Bearer $POLAR_KEY" \
    "Content-Type: application/json" "Content-Length: ${#body}" "Connection: close" "" >&3
printf %s "$body" >&3
cat <&3 > answer.txt
"""
"""One model call by a shell alone: an interpreter's start would be most of a session."""

AGENTS = (*[ASK] * 7, f"{ASK}\nexit 7", f"{ASK}\nsetsid sleep 600 & disown", f"{ASK}\nkill -SEGV $$")
"""Mostly honest; of ten one fails, one leaves a process behind and one crashes."""

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(7200)]


@dataclass(frozen=True)
class Measured:
    """Of one process, or of all its children that have the same name and live on."""

    memory: int
    descriptors: int


@dataclass(frozen=True)
class Place:
    """A server, a node, and where they live."""

    directory: Path
    server: psutil.Process
    node: psutil.Process
    client: AsyncClient

    async def idle(self) -> dict[str, Measured]:
        """What is there once nothing has been to do for a while."""
        quiet_since, busy = time.monotonic(), self._busy()

        def is_idle() -> bool:
            nonlocal quiet_since, busy
            if (now := self._busy()) != busy:
                quiet_since, busy = time.monotonic(), now
            return time.monotonic() - quiet_since >= IDLE_SECONDS

        await eventually(is_idle, math.inf, every=0.5)
        return self._measured()

    def left(self) -> list[Path]:
        """Files and directories that belong to no session that is still there."""
        ended = (self.directory / "node/nodes/soak" / name for name in ("sessions", "logs", "captures"))
        places = (*ended, self.directory / "tmp")
        return [path for place in places if place.is_dir() for path in place.iterdir()]

    def mounts(self) -> list[str]:
        lines = Path(f"/proc/{self.node.pid}/mountinfo").read_text().splitlines()
        return [line for line in lines if str(self.directory) in line]

    def strays(self) -> list[str]:
        """Processes of a sandbox, wherever they have fled to: they have its environment or its mounts."""
        own = {one.pid for root in (self.server, self.node) for one in (root, *root.children(recursive=True))}
        others = (place for place in Path("/proc").glob("[0-9]*") if int(place.name) not in own)
        return [_command(place) for place in others if self._is_of_sandbox(place)]

    def _is_of_sandbox(self, process: Path) -> bool:
        # Of a mount the path is told from the root of its file system.
        marker = "/".join((*self.directory.parts[-2:], "node/nodes/soak")).encode()
        try:
            return any(marker in (process / name).read_bytes() for name in ("environ", "mountinfo"))
        except OSError:
            return False

    def _busy(self) -> tuple[int, ...]:
        """Changes while something is at work: the node's children, and what is on its disk."""
        children = sorted(child.pid for child in self.node.children(recursive=True))
        return (*children, -1, len(self.left()), len(self.mounts()))

    def _measured(self) -> dict[str, Measured]:
        found: dict[str, Measured] = {}
        for name, process in (("server", self.server), ("node", self.node)):
            for place, one in enumerate([process, *process.children(recursive=True)]):
                label = name if place == 0 else f"{name} child {place}"
                found[label] = Measured(one.memory_full_info().uss, one.num_fds())
        return found


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    (tmp_path / "tmp").mkdir()
    async with answering_engine(lambda _body: Said("A fine answer.")) as engine:
        server = {"data_dir": str(tmp_path / "server"), "server": {"port": 0, "token": TOKEN}}
        serving = _polar(tmp_path, "server", server, "serve", "--no-node", says="serving nodes at")
        async with serving as (one, said):
            url = said.split()[3]
            node = {
                "data_dir": str(tmp_path / "node"),
                "engine": {"url": engine.url, "mode": "chat"},
                "node": {
                    "name": "soak",
                    "server": url,
                    "run_slots": 6,
                    "runtimes": ["bubblewrap", "process"],
                },
            }
            ready = _polar(tmp_path, "node", node, "node", says="ready as")
            async with ready as (other, _said), AsyncClient(url, TOKEN) as client:
                yield Place(tmp_path, one, other, client)


@asynccontextmanager
async def _polar(
    directory: Path, name: str, settings: Mapping[str, object], *command: str, says: str
) -> AsyncIterator[tuple[psutil.Process, str]]:
    """A process of Polar, once it works, and the line in which it says so; it is asked to end afterwards."""
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    with (directory / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "polar", *command, "--config", str(file)),
            cwd=directory,
            env={**os.environ, "POLAR_TOKEN": TOKEN, "TMPDIR": str(directory / "tmp")},
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    try:
        yield psutil.Process(process.pid), await _line(process.stdout, says)
    finally:
        process.terminate()
        await process.communicate()


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return process.name


async def _line(output: asyncio.StreamReader, says: str) -> str:
    async for line in output:
        if says in line.decode():
            return line.decode()
    raise AssertionError(f"a process ended before it said {says!r}")


def tasks(wave: int) -> list[TaskSpec]:
    """A wave's sessions, two thirds of them in bubblewrap."""
    return [
        TaskSpec.model_validate(
            {
                "id": f"soak-{wave}-{number}",
                "instruction": "Say something.",
                "harness": {
                    "name": "shell",
                    "options": {
                        "command": ["bash", "-c", AGENTS[number % len(AGENTS)], "agent", str(number)]
                    },
                },
                "runtime": "process" if number % 3 == 0 else "bubblewrap",
                "evaluator": {"name": "command", "options": {"command": "grep -q fine answer.txt"}},
                "samples": SAMPLES,
            }
        )
        for number in range(WAVE // SAMPLES)
    ]


async def roll_out(place: Place, wave: int) -> None:
    """Run one wave to its end; every session makes its call and is scored for it."""
    submitted = tasks(wave)
    async for _view in place.client.submit_all(submitted):
        pass
    results = await place.client.wait([task.id for task in submitted], timeout=3600)
    assert len(results) == len(submitted) * SAMPLES
    bad = [one for one in results if one.status is not SessionStatus.COMPLETED or one.reward != 1.0]
    assert not bad, bad[0]


def told(ended: int, seconds: float, measured: Mapping[str, Measured]) -> str:
    shown = ", ".join(f"{name} {one.memory / 2**20:.1f} MiB" for name, one in measured.items())
    return f"{ended:6} sessions, {ended / seconds:5.1f} a second: {shown}"


async def test_sessions_leave_nothing_and_no_process_grows(place: Place) -> None:
    began = time.monotonic()
    first: dict[str, Measured] = {}
    for wave in range(1, SESSIONS // WAVE + 1):
        await roll_out(place, wave)
        last = await place.idle()
        if wave * WAVE >= WARM:
            first = first or last
        print(told(wave * WAVE, time.monotonic() - began, last), flush=True)
    assert place.left() == []
    assert place.mounts() == []
    assert place.strays() == []
    assert last.keys() == first.keys()
    for name, one in last.items():
        assert one.descriptors <= first[name].descriptors + KEPT_CONNECTIONS, f"{name}: descriptors"
        assert one.memory <= MOST_GROWTH * first[name].memory, f"{name}: memory"
