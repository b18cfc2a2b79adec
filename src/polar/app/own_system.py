"""Where a command runs its tasks: on a running server, or on a system started for them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.app.stack import Say, running
from polar.config import plugins
from polar.config.plugins import check_components
from polar.config.settings import Settings, load_settings
from polar.errors import Conflict, InvalidInput, NotInstalled
from polar.files import digest, locked, write_atomic
from polar.models.task import TaskSpec
from polar.runtimes.base import Runtime
from polar.store.store import Store

DATA = ".polar"
"""The directory, inside a command's output directory, of the system started for it."""
PROCESS = "process"
"""The runtime that the settings must allow explicitly."""
ATTEMPTS = 100
"""Maximum attempts per session: a run that may be interrupted must not give up on one."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A rollout server; None takes the environment's or this directory's."""

    url: str | None
    token: str | None
    read_token: str | None = None
    """Opens the dashboard to readers, if the server was started here."""


@contextmanager
def only_writer(out: Path, command: str) -> Iterator[None]:
    """Lock this directory against other processes running the command; the lock ends with the process."""
    with locked(out / ".lock", busy=Conflict(f"{out}: another `polar {command}` is writing there")):
        yield


def bind_weights(out: Path, weights: Path | None) -> None:
    """Bind an output directory to the weights that its sessions are sampled with, since it can be resumed."""
    memo, mine = out / DATA / "sampled-with", digest(weights) if weights else "the model's own weights"
    if not memo.exists():
        write_atomic(memo, mine)
    elif memo.read_text() != mine:
        raise InvalidInput(
            f"{out} was started with other weights than {weights or mine}",
            hint="use the same weights, or choose another --out",
        )


def own_settings(out: Path, config: Path | None, engine: dict[str, Any], concurrency: int | None) -> Settings:
    """Return the settings of a system that stores its data in an output directory."""
    return load_settings(
        config,
        {
            "data_dir": out / DATA,
            "server": {"port": 0, "max_attempts": ATTEMPTS},
            "engine": engine,
            "node": {"run_slots": concurrency},
        },
    )


@asynccontextmanager
async def rollout_server(
    place: ServerAddress | Settings, tasks: Sequence[TaskSpec], say: Say, *, policy: Path | None = None
) -> AsyncIterator[ServerAddress]:
    """Yield the server at this address, or one started for the block with the weights `policy`."""
    if isinstance(place, ServerAddress):
        yield place
        return
    for task in tasks:
        check_components(task)
    runtimes = tuple(sorted({task.runtime.name for task in tasks}))
    await _check_runtimes(runtimes, place)
    for name, task in {task.harness.name: task for task in tasks}.items():
        say(f"preparing harness {name} (downloaded once)")
        installation = await plugins.create("harnesses", "harness", task.harness).install()
        say(f"{name} {installation.version}")
    await _requeue(place)
    async with running(place.updated(node={"runtimes": runtimes}), say, policy=policy) as stack:
        say(f"running at {stack.url}")
        yield ServerAddress(stack.url, stack.token, stack.read_token)


async def _check_runtimes(names: Sequence[str], settings: Settings) -> None:
    if PROCESS in names and PROCESS not in settings.node.runtimes:
        raise InvalidInput(
            f"the tasks use the runtime {PROCESS!r}, which isolates nothing and is not allowed",
            hint=f"use bubblewrap, or allow it with `node: {{runtimes: [{PROCESS}]}}` in polar.yaml",
        )
    for name in names:
        runtime: type[Runtime] = plugins.load("runtimes", name)
        reason = await runtime.unavailable()
        if reason is not None:
            raise NotInstalled(f"runtime {name}: {reason}", hint="use another runtime in the taskset")


async def _requeue(settings: Settings) -> None:
    """Requeue sessions of a killed run; call this only if nobody else uses this data."""
    ahead = settings.server.lease_seconds
    async with Store.open(settings.data_dir.absolute(), lambda: time.time() + ahead) as store:
        await store.leases.expire(max_attempts=ATTEMPTS)
