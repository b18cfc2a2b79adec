"""A push that is interrupted, wherever and whoever dies, leaves nobody paused and every order loadable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from polar import errors
from polar.app.weights import EngineWeights
from polar.client import AsyncClient
from polar.config.settings import ServerSettings
from polar.engines.base import Engine
from polar.engines.pausable import PausableEngine
from polar.errors import Backoff, Unavailable
from polar.models.policy import PolicyView
from polar.node import policy as node_policy
from polar.node.policy import PolicyFollower
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.lossy_clients import LOSSES, Killed, Moment, Trouble, TroubledClient, TroubledNode
from tests.fakes.pushed_weights import Saved
from tests.fakes.switchable_engine import ReadingEngine, Step
from tests.waiting import eventually

TOKEN = "a token for tests only"
DEADLINE = 60.0


class Door(PausableEngine):
    """As much of a gateway as an order concerns; that of a node that was killed is gone with it."""

    def __init__(self, engine: Engine, node: TroubledNode) -> None:
        super().__init__(engine)
        self._node = node

    @property
    def is_paused(self) -> bool:
        return super().is_paused and not self._node.is_dead

    async def policy_version(self) -> int:
        return (await self.model_info()).policy_version


@dataclass
class System:
    """A control plane and a node with an engine; the node is started again when it dies."""

    store: Store
    server: RolloutServer
    root: Path
    client: AsyncClient
    engine: ReadingEngine = field(default_factory=ReadingEngine)
    node_trouble: Trouble = field(default_factory=Trouble)
    node: TroubledNode = field(init=False)
    door: Door = field(init=False)

    @property
    def url(self) -> str:
        return self.server.url

    async def restart_server(self) -> None:
        """Nothing outlives it but what is stored."""
        port = int(self.url.rpartition(":")[2])
        await self.server.close()
        self.server = RolloutServer(self.store, TOKEN, ServerSettings(port=port))
        await self.server.start()

    async def run_node(self) -> None:
        while True:
            async with TroubledNode(self.url, TOKEN, self.node_trouble) as self.node:
                self.door = Door(self.engine, self.node)
                with suppress(Killed):
                    await PolicyFollower("node", self.node, cast(Any, self.door), [self.root]).run()

    async def kill_node(self) -> None:
        raise self.node.die()

    def trainer(self, trouble: Trouble | None = None) -> EngineWeights:
        client = TroubledClient(self.url, TOKEN, trouble or Trouble())
        return EngineWeights(client, self.root / "run", self.root / "weights")

    async def settled(self) -> PolicyView:
        async def seen() -> PolicyView | None:
            # The server may be starting again.
            with suppress(Unavailable):
                view = await self.client.policy()
                if view.nodes and view.is_settled and not self.door.is_paused:
                    return view
            return None

        return await eventually(seen, DEADLINE)

    def weights(self) -> list[str]:
        return [str(path) for path in (self.root / "weights").glob("*/*")]


@pytest.fixture
async def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    monkeypatch.setattr(errors, "RESTART", Backoff(0.0, 0.0, attempts=4))
    monkeypatch.setattr(node_policy, "RETRY_SECONDS", 0.01)
    async with _running(tmp_path) as made:
        yield made


@asynccontextmanager
async def _running(directory: Path) -> AsyncIterator[System]:
    async with (
        Store.open(directory / "data") as store,
        RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
        AsyncClient(server.url, TOKEN) as client,
    ):
        made = System(store, server, directory, client)
        node = asyncio.create_task(made.run_node())
        try:
            yield made
        finally:
            node.cancel()
            await asyncio.wait({node})
            await made.server.close()


async def _ends_well(system: System) -> None:
    """Everybody samples with weights that are there, and the next trainer's push leaves only its own."""
    view = await system.settled()
    assert system.engine.info.policy_version == view.version
    assert not system.engine.is_paused
    assert view.path is None or view.path in system.weights()
    version = await asyncio.to_thread(system.trainer().push, Saved())
    last = await system.settled()
    assert (last.version, [last.path]) == (version, system.weights())
    assert version > view.version


CONTENTS = ("whole", "damaged")


@pytest.mark.parametrize("loss", LOSSES, ids=["connection", "process"])
@pytest.mark.parametrize("moment", Moment)
async def test_a_trainer_may_be_interrupted_at_any_call(
    system: System, moment: Moment, loss: Callable[[], BaseException]
) -> None:
    for calls, content in product(({0}, {1}, {1, 2}, {1, 2, 3}), CONTENTS):
        trouble = Trouble()
        trainer = system.trainer(trouble)
        await asyncio.to_thread(trainer.push, Saved())
        trouble.begin(calls, moment, loss)
        with suppress(Killed):
            await asyncio.to_thread(trainer.push, Saved(content))
        await _ends_well(system)


@pytest.mark.parametrize("loss", LOSSES, ids=["connection", "process"])
@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
async def test_a_node_may_be_interrupted_at_any_call(
    system: System, moment: Moment, loss: Callable[[], BaseException]
) -> None:
    for call, content in product(range(5), CONTENTS):
        trainer = system.trainer()
        await asyncio.to_thread(trainer.push, Saved())
        system.node_trouble.begin({call}, moment, loss)
        await asyncio.to_thread(trainer.push, Saved(content))
        await _ends_well(system)


@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize("who", ["server", "node", "engine"])
async def test_the_server_a_node_or_its_engine_may_die_at_any_step(
    system: System, who: str, step: Step
) -> None:
    engine = system.engine
    happens = {"node": system.kill_node, "engine": engine.die, "server": system.restart_server}[who]
    # What is damaged is never loaded.
    for content in CONTENTS[:1] if step is Step.LOADED else CONTENTS:
        trainer = system.trainer()
        await asyncio.to_thread(trainer.push, Saved())
        await system.settled()
        engine.happens, engine.happens_at = happens, step  # type: ignore[method-assign]
        with suppress(Unavailable):
            await asyncio.to_thread(trainer.push, Saved(content))
        await _ends_well(system)
        assert engine.happens_at is None
