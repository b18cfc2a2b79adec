"""Where a generation runs: on a server that is there, or on a whole system of its own beside its data."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar import plugins
from polar.app.datagen.plan import PlannedTask
from polar.app.stack import running
from polar.config.settings import Settings, load_settings
from polar.errors import Conflict, InvalidInput, NotInstalled
from polar.files import locked
from polar.runtimes.base import Runtime
from polar.store.store import Store

DATA = ".polar"
"""In the output directory: the data of a system of its own."""
PROCESS = "process"
"""The one runtime that the settings must allow before tasks may name it."""
ATTEMPTS = 100
"""How often a session may be begun: a run that is meant to be interrupted must not give up on one."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """A rollout server; None: what the environment and the settings of this directory say."""

    url: str | None
    token: str | None


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Nobody else generates into this directory meanwhile; the lock ends with the process."""
    with locked(out / ".lock", busy=Conflict(f"{out}: another `polar generate` is writing there")):
        yield


def own_settings(out: Path, config: Path | None, engine: dict[str, Any], concurrency: int | None) -> Settings:
    """The settings of a system of its own."""
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
async def own_system(settings: Settings, plan: Sequence[PlannedTask], say: Say) -> AsyncIterator[Place]:
    """Everything started for these tasks, and ended afterwards."""
    runtimes = tuple(sorted({planned.spec.runtime.name for planned in plan}))
    if PROCESS in runtimes and PROCESS not in settings.node.runtimes:
        raise InvalidInput(
            f"the tasks name the runtime {PROCESS!r}, which isolates nothing and is not allowed here",
            hint=f"name bubblewrap, or allow it with `node: {{runtimes: [{PROCESS}]}}` in polar.yaml",
        )
    for name in runtimes:
        runtime: type[Runtime] = plugins.load("runtimes", name)
        reason = await runtime.unavailable()
        if reason is not None:
            raise NotInstalled(f"runtime {name}: {reason}", hint="name another runtime in the taskset")
    for name, planned in {planned.spec.harness.name: planned for planned in plan}.items():
        say(f"preparing harness {name}")
        await plugins.create("harnesses", "harness", planned.spec.harness).install()
    await _take_back(settings)
    node = settings.node.model_copy(update={"runtimes": runtimes})
    async with running(settings.model_copy(update={"node": node}), say) as stack:
        say(f"running at {stack.url}")
        yield Place(stack.url, stack.token)


async def _take_back(settings: Settings) -> None:
    """Queue again what an earlier run held when it was killed, instead of waiting for its leases to end.

    To be called only where nobody else works on this data.
    """
    ahead = settings.server.lease_seconds
    async with Store.open(settings.data_dir.absolute(), lambda: time.time() + ahead) as store:
        await store.leases.expire(max_attempts=ATTEMPTS)
