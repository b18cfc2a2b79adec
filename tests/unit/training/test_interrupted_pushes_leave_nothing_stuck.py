"""A push that is interrupted, wherever and whoever dies, leaves nobody paused and every order loadable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from polar import errors
from polar.app.weights import EngineWeights
from polar.client import AsyncClient, Client
from polar.config.settings import ServerSettings
from polar.engines.base import EngineDown, EngineError, WeightUpdate
from polar.engines.pausable import PausableEngine
from polar.errors import Backoff, Unavailable
from polar.models.policy import PauseMode, PolicyOrder, PolicyReport, PolicyView
from polar.node import policy as node_policy
from polar.node.policy import PolicyFollower
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.switchable_engine import SwitchableEngine

TOKEN = "a token for tests only"
DEADLINE = 60.0


class Moment(Enum):
    """When the connection is lost."""

    BEFORE = auto()
    UNDER_WAY = auto()
    """The server has the request, and nobody waits for its answer."""
    AFTER = auto()


class Killed(BaseException):
    """The process is gone."""


LOSSES: list[Callable[[], BaseException]] = [lambda: Unavailable("the connection is lost"), Killed]


@dataclass
class Trouble:
    """Which calls are lost, when, and whether the caller is with them."""

    calls: set[int] = field(default_factory=set)
    moment: Moment = Moment.BEFORE
    loss: Callable[[], BaseException] = LOSSES[0]
    made: int = -1

    def begin(self, calls: set[int], moment: Moment, loss: Callable[[], BaseException]) -> None:
        self.calls, self.moment, self.loss, self.made = calls, moment, loss, -1

    def meets_next(self) -> bool:
        self.made += 1
        return self.made in self.calls


class TroubledClient(Client):
    """What a trainer asks with."""

    def __init__(self, url: str, trouble: Trouble) -> None:
        super().__init__(url, TOKEN)
        self.trouble = trouble

    def policy(self) -> PolicyView:
        is_lost = self.trouble.meets_next()
        if is_lost and self.trouble.moment is Moment.BEFORE:
            raise self.trouble.loss()
        view = super().policy()
        if is_lost:
            raise self.trouble.loss()
        return view

    def update_policy(self, path: str | Path | None = None, **asked: Any) -> PolicyView:
        is_lost = self.trouble.meets_next()
        if is_lost and self.trouble.moment is Moment.BEFORE:
            raise self.trouble.loss()
        if is_lost and self.trouble.moment is Moment.UNDER_WAY:
            asked["wait_seconds"] = 0.0
        view = super().update_policy(path, **asked)
        if is_lost:
            raise self.trouble.loss()
        return view


class TroubledNode(AsyncClient):
    """What a node asks with."""

    def __init__(self, url: str, trouble: Trouble) -> None:
        super().__init__(url, TOKEN)
        self.trouble = trouble

    async def follow_policy(self, node: str, report: PolicyReport) -> PolicyOrder:
        is_lost = self.trouble.meets_next()
        if is_lost and self.trouble.moment is Moment.BEFORE:
            raise self.trouble.loss()
        order = await super().follow_policy(node, report)
        if is_lost:
            raise self.trouble.loss()
        return order


class Step(Enum):
    """How far an engine is with an update."""

    RUNNING = auto()
    PAUSED = auto()
    LOADING = auto()
    LOADED = auto()
    RESUMING = auto()
    RESUMED = auto()


class ReadingEngine(SwitchableEngine):
    """Loads what is there and whole; something may happen at one step."""

    happens_at: Step | None = None

    async def happens(self) -> None:
        """What happens there, once."""

    async def pause(self, mode: PauseMode) -> None:
        await self._reached(Step.RUNNING)
        await super().pause(mode)
        await self._reached(Step.PAUSED)

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._reached(Step.LOADING)
        if update.path is not None and (Path(update.path) / "weights").read_text() != "whole":
            raise EngineError("the weights are damaged")
        await super().update_weights(update)
        await self._reached(Step.LOADED)

    async def resume(self) -> None:
        await self._reached(Step.RESUMING)
        await super().resume()
        await self._reached(Step.RESUMED)

    async def die(self) -> None:
        """Its process ends, and is started again with the weights it began with."""
        self.is_paused, self.info = False, replace(self.info, policy_version=0)
        raise EngineDown("the engine is gone")

    async def _reached(self, step: Step) -> None:
        if step is self.happens_at:
            self.happens_at = None
            await self.happens()


class Door(PausableEngine):
    """As much of a gateway as an order concerns."""

    async def policy_version(self) -> int:
        return (await self.model_info()).policy_version


class Saved:
    def __init__(self, content: str = "whole") -> None:
        self._content = content

    def export(self, directory: Path) -> None:
        (directory / "weights").write_text(self._content)


@dataclass
class System:
    """A control plane and a node with an engine; the node is started again when it dies."""

    store: Store
    server: RolloutServer
    root: Path
    client: AsyncClient
    engine: ReadingEngine = field(default_factory=ReadingEngine)
    node_trouble: Trouble = field(default_factory=Trouble)
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
            self.door = Door(self.engine)
            async with TroubledNode(self.url, self.node_trouble) as client:
                follower = PolicyFollower("node", client, cast(Any, self.door), [self.root])
                with suppress(Killed):
                    # Not `run`: one that is killed takes no leave.
                    while True:
                        await follower._follow()

    def trainer(self, trouble: Trouble | None = None) -> EngineWeights:
        client = TroubledClient(self.url, trouble or Trouble())
        return EngineWeights(client, self.root / "run", self.root / "weights")

    async def settled(self) -> PolicyView:
        async with asyncio.timeout(DEADLINE):
            while True:
                # The server may be starting again.
                with suppress(Unavailable):
                    view = await self.client.policy()
                    if view.nodes and view.is_settled and not self.door.is_paused:
                        return view
                await asyncio.sleep(0.01)

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


async def _killed() -> None:
    raise Killed


@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize("who", ["server", "node", "engine"])
async def test_the_server_a_node_or_its_engine_may_die_at_any_step(
    system: System, who: str, step: Step
) -> None:
    engine = system.engine
    happens = {"node": _killed, "engine": engine.die, "server": system.restart_server}[who]
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
