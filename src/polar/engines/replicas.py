"""Several engines with the same model behind one face: a session stays where its prefix is cached."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import replace
from hashlib import blake2b
from math import ceil
from typing import TypeVar

from polar.config import plugins
from polar.config.settings import EngineSettings
from polar.engines.base import (
    HALF_REPLACED,
    ChatCall,
    ChatChunk,
    Engine,
    EngineDown,
    EngineError,
    GenerateRequest,
    Mode,
    ModelInfo,
    TokenChunk,
    WeightUpdate,
)
from polar.engines.model_server import ModelServer
from polar.errors import Backoff, InvalidInput
from polar.models.chat import ChatRequest
from polar.models.policy import PauseMode
from polar.telemetry.readings import Readings

log = logging.getLogger(__name__)

T = TypeVar("T")
Chunk = TypeVar("Chunk", TokenChunk, ChatChunk)

TRIES = 3
"""Maximum replicas per request; each retries its own connection."""
FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 30.0
PROBE_SECONDS = 60.0
"""A replica may be answering long prompts while it is probed."""

SKEW = 1.5
"""A replica is overloaded with more than this many times the mean number of open requests.

Pinning without such a bound piles sessions up on one replica until they evict each other's prefixes;
a bound near 1 sends sessions away, to a cold cache, for what is only chance.
"""
LIGHT = 8
"""A replica with this few open requests is never overloaded: recomputing a prefix costs more."""
DISPLACED = 100_000
"""Number of displaced sessions remembered; others return to their first replica."""


def ranking(key: str, names: Collection[str]) -> list[str]:
    """The replicas in the order in which a key prefers them.

    Rendezvous hashing: the order of two replicas does not depend on which others there are, so one
    that goes moves only its own keys, and takes back the same ones when it returns.
    """

    def weight(name: str) -> bytes:
        return blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def limit(open_requests: int, replicas: int) -> int:
    """The most requests one replica may have open when this many are open in all."""
    return max(LIGHT, ceil(SKEW * open_requests / replicas))


def choice(key: str, loads: Mapping[str, int], displaced_to: str | None = None) -> str:
    """The replica a new request goes to: the first in the key's ranking that it does not overload.

    A key that was sent away stays where it was sent, with its prefix, until that replica is overloaded too.
    """
    bound = limit(sum(loads.values()) + 1, len(loads))
    order = ranking(key, loads)
    if displaced_to is not None and displaced_to in loads:
        order.insert(0, displaced_to)
    return next(name for name in order if loads[name] < bound)


class Replicas(Engine):
    """An engine made of others, by name; their URLs will do. A name decides which sessions it gets."""

    def __init__(
        self, engines: Mapping[str, Engine], *, first_backoff_seconds: float = FIRST_BACKOFF_SECONDS
    ) -> None:
        if not engines:
            raise InvalidInput("no engine is named")
        self._replicas = {name: _Replica(name, engine) for name, engine in engines.items()}
        self._first_backoff_seconds = first_backoff_seconds
        self._model: ModelInfo | None = None
        self._mode = Mode.TOKENS
        """The mode to check a recovered replica for."""
        self._update: WeightUpdate | None = None
        """The weights a replica must have before it gets requests."""
        self._displaced: OrderedDict[str, str] = OrderedDict()
        """Replica of each session that is not on its first choice, most recent last."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        session = request.session or request.request_id
        return self._stream_with_failover(session, lambda engine: engine.generate(request))

    def chat(self, call: ChatCall) -> AsyncGenerator[ChatChunk, None]:
        session = call.session or call.request_id
        return self._stream_with_failover(session, lambda engine: engine.chat(call))

    async def _stream_with_failover(
        self, key: str, ask: Callable[[Engine], AsyncGenerator[Chunk, None]]
    ) -> AsyncGenerator[Chunk, None]:
        """Stream from the key's replica, or from another if it fails before the first chunk."""
        tried: set[str] = set()
        while True:
            replica = self._choose(key, tried)
            tried.add(replica.name)
            has_begun = False
            try:
                with replica.carrying_one_more():
                    async with aclosing(ask(replica.engine)) as chunks:
                        async for chunk in chunks:
                            has_begun = True
                            yield chunk
                return
            except EngineDown as error:
                if has_begun:
                    raise
                self._put_aside(replica, error)
                if len(tried) == min(TRIES, len(self._replicas)):
                    raise

    async def model_info(self) -> ModelInfo:
        """The model that all reachable replicas report; raise InvalidInput if they differ."""
        replicas = self._replicas.values()
        found = await asyncio.gather(*(self._try(each, each.engine.model_info()) for each in replicas))
        infos = {name: info for name, info in zip(self._replicas, found, strict=True) if info is not None}
        if not infos:
            raise self._all_down()
        if len({(info.name, info.max_context) for info in infos.values()}) > 1:
            said = "; ".join(
                f"{name} serves {info.name} with a context of {info.max_context}"
                for name, info in infos.items()
            )
            raise InvalidInput(f"the engines must serve the same model: {said}")
        # While an update goes round, the oldest weights are what a token may still come from.
        asked = [info for name, info in infos.items() if self._replicas[name].is_up] or infos.values()
        oldest = min(asked, key=lambda info: (info.policy_version != HALF_REPLACED, info.policy_version))
        modes = {info.logprobs_mode for info in asked}
        self._model = oldest if len(modes) == 1 else replace(oldest, logprobs_mode=None)
        return self._model

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        self._mode = mode
        await asyncio.gather(*(self._try(each, each.engine.check(mode)) for each in self._up))
        if not self._up:
            raise self._all_down()

    async def count_tokens(self, chat: ChatRequest) -> int | None:
        return await self._up[0].engine.count_tokens(chat) if self._up else None

    async def score(self, ids: list[int]) -> list[float]:
        """Score on the least loaded replica, since scoring uses no cache."""
        replica = min(self._up or self._replicas.values(), key=lambda replica: replica.open)
        with replica.carrying_one_more():
            return await replica.engine.score(ids)

    async def tokenize(self, text: str) -> list[int] | None:
        answers = await asyncio.gather(*(replica.engine.tokenize(text) for replica in self._up))
        known = [answer for answer in answers if answer is not None]
        if any(answer != known[0] for answer in known):
            raise InvalidInput(f"the engines tokenise differently: {', '.join(self._replicas)}")
        return known[0] if known else None

    async def readings(self) -> dict[str, Readings | None]:
        engines = (replica.engine for replica in self._replicas.values())
        found = await asyncio.gather(*(engine.readings() for engine in engines))
        return {url: read for readings in found for url, read in readings.items()}

    async def pause(self, mode: PauseMode) -> None:
        await self._all("pause", lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._all("resume", lambda engine: engine.resume())

    async def update_weights(self, update: WeightUpdate) -> None:
        """Update all healthy replicas; one that fails is put aside until it is updated too."""
        asked = await self._all("change its weights", lambda engine: engine.update_weights(update))
        self._update = update
        for replica in self._up:
            if replica not in asked:
                self._put_aside(replica, EngineDown("it came back while the others changed their weights"))

    def must_drain(self, update: WeightUpdate) -> bool:
        return any(replica.engine.must_drain(update) for replica in self._replicas.values())

    async def _all(self, purpose: str, do: Callable[[Engine], Coroutine[None, None, None]]) -> list[_Replica]:
        """Run it on every healthy replica and return those; raise EngineError, keeping all, if none
        succeeds."""
        up = self._up
        if not up:
            raise self._all_down()
        done = await asyncio.gather(*(do(replica.engine) for replica in up), return_exceptions=True)
        failures = [(replica, error) for replica, error in zip(up, done, strict=True) if error is not None]
        for _, error in failures:
            if not isinstance(error, EngineError):
                raise error
        if len(failures) == len(up):
            said = "; ".join(f"{replica.name}: {error}" for replica, error in failures)
            raise EngineError(f"none of the {len(self._replicas)} engines can {purpose}: {said}")
        for replica, error in failures:
            self._put_aside(replica, EngineDown(f"it cannot {purpose}: {error}"))
        return up

    async def close(self) -> None:
        probes = [replica.probe for replica in self._replicas.values() if replica.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for replica in self._replicas.values():
            await replica.engine.close()

    def _choose(self, key: str, tried: Collection[str]) -> _Replica:
        left = [replica for name, replica in self._replicas.items() if name not in tried]
        # When none is known to be up, one may be by now: trying costs less than refusing.
        candidates = [replica for replica in left if replica.is_up] or left
        loads = {replica.name: replica.open for replica in candidates}
        chosen = choice(key, loads, self._displaced.pop(key, None))
        if chosen != ranking(key, self._replicas)[0]:
            self._displaced[key] = chosen
            if len(self._displaced) > DISPLACED:
                self._displaced.popitem(last=False)
        return self._replicas[chosen]

    @property
    def _up(self) -> list[_Replica]:
        return [replica for replica in self._replicas.values() if replica.is_up]

    async def _try(self, replica: _Replica, asked: Awaitable[T]) -> T | None:
        """Return a replica's answer; put it aside and return None if it is down."""
        try:
            return await asked
        except EngineDown as error:
            self._put_aside(replica, error)
            return None

    def _put_aside(self, replica: _Replica, error: EngineDown) -> None:
        replica.last_error = error
        if replica.is_up:
            log.warning("replica %s is put aside, its sessions move: %s", replica.name, error)
            replica.probe = asyncio.create_task(self._readmit_when_up(replica))

    async def _readmit_when_up(self, replica: _Replica) -> None:
        for pause in Backoff(self._first_backoff_seconds, LAST_BACKOFF_SECONDS).pauses():
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._probe(replica)
            except Exception as error:
                log.info("replica %s stays aside: %s", replica.name, error or type(error).__name__)
            else:
                log.info("replica %s is back", replica.name)
                replica.probe = None
                # Its sessions come back to it, so that it takes its share of the load again.
                self._displaced.clear()
                return

    async def _probe(self, replica: _Replica) -> None:
        """Raise unless the replica serves our model in a usable way."""
        info = await replica.engine.model_info()
        model = self._model
        if model is not None and (info.name, info.max_context) != (model.name, model.max_context):
            raise InvalidInput(
                f"it now serves {info.name} with a context of {info.max_context},"
                f" the others {model.name} with {model.max_context}"
            )
        update = self._update
        if update is not None and info.policy_version != update.version:
            await replica.engine.update_weights(update)
        await replica.engine.resume()
        await replica.engine.check(self._mode)
        if self._update is not update:
            raise EngineDown("the others have changed their weights meanwhile")

    def _all_down(self) -> EngineDown:
        said = "; ".join(
            f"{name}: {replica.last_error}" for name, replica in self._replicas.items() if replica.last_error
        )
        return EngineDown(f"none of the {len(self._replicas)} engines can be reached: {said}")


class _Replica:
    """One engine with its open requests and its health."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.open = 0
        self.probe: asyncio.Task[None] | None = None
        """Runs while the replica is put aside."""
        self.last_error: EngineDown | None = None

    @property
    def is_up(self) -> bool:
        return self.probe is None

    @contextmanager
    def carrying_one_more(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


def engine_client(settings: EngineSettings, urls: Sequence[str]) -> Engine:
    """The client of the one engine, or of all replicas as if they were one."""
    client = plugins.load("engines", settings.client)
    named = settings.model if "model" in settings.model_fields_set else None
    if settings.record_routing and not issubclass(client, ModelServer):
        raise InvalidInput(
            f"engine.record_routing: an engine of kind {settings.kind} tells no experts",
            hint="vllm and sglang do",
        )
    more = {"record_routing": True} if settings.record_routing else {}
    engines: dict[str, Engine] = {
        url: client(url, settings.api_key, model=named, max_context=settings.max_context, **more)
        for url in urls
    }
    return engines[urls[0]] if len(urls) == 1 else Replicas(engines)
