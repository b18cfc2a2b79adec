"""What vLLM and SGLang share: they are tried out at start, give tokens, tokenise, can be paused, and sample
with adapters that are loaded under way."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, ClassVar
from uuid import uuid4

import orjson

from polar.engines import chat_wire
from polar.engines.base import (
    ChatCall,
    ChatChunk,
    EngineDown,
    EngineError,
    GenerateRequest,
    Mode,
    TokenChunk,
    WeightUpdate,
)
from polar.engines.http import ORDER_SECONDS, HttpEngine, NotAccepted, Question, reason_in
from polar.models.chat import ChatRequest, Sampling, ToolDefinition
from polar.models.session import PROCESSED, RAW
from polar.telemetry.readings import Readings, read

log = logging.getLogger(__name__)

READINGS_SECONDS = 2.0
"""For an engine's page of metrics: whoever waits for ours has a limit too."""
PAUSE_PATIENCE_SECONDS = 60.0
"""How long a pause may last that is found at start."""
PROBE_TEMPERATURES = (1.0, 2.0)
"""What an engine that does not say so is asked at, to see whether temperature counts in its logprobs."""
PROBE_TOLERANCE = 0.05
"""Logprobs of one token that are closer than this are the same: engines round, and add up in any order."""
LET_GO_SECONDS = 2.0
"""How long letting an older adapter go is waited for: SGLang first lets end what others sample with it."""
ADAPTER = "polar-"
"""How the names of adapters begin; the version follows, and for vLLM what tells it from those of others."""
_PROBE_TOOL = ToolDefinition("probe", "Does nothing.", {"type": "object", "properties": {}})


class ModelServer(HttpEngine):
    """An inference server that gives ids and logprobs of what it samples."""

    chat_requirement: ClassVar[str]
    """What the server must be for chat mode: the hint when its check fails."""
    resume_path: ClassVar[str]
    routing_requirement: ClassVar[str]
    """What it must be to tell which experts tokens went to."""
    adapter_paths: ClassVar[str]
    """What stands before `/load_lora_adapter` and `/unload_lora_adapter`."""
    adapter_needs: ClassVar[str]
    """How the server must be started to load adapters."""

    _adapter: str | None = None
    """The name under which requests ask for the adapter in use; None: the model's own weights are."""
    _known_in = 0
    """The epoch of the connections in which the server was last asked for its version."""
    _logprobs_mode: str | None = None
    """What `check` has found out."""

    def __init__(
        self, url: str, api_key: str | None = None, *, record_routing: bool = False, **settings: Any
    ) -> None:
        super().__init__(url, api_key, **settings)
        self._records_routing = record_routing
        self._experts: int | None = None
        """How many each token goes to, in all layers, as `check` has found out."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        return self._answer(request, self._tokens_of)

    def chat(self, call: ChatCall) -> AsyncGenerator[ChatChunk, None]:
        return self._answer(call, self._chat_of)

    @abstractmethod
    async def _tokens_of(self, request: GenerateRequest) -> Question[TokenChunk]:
        """How the server is asked for tokens."""

    @abstractmethod
    async def _chat_of(self, call: ChatCall) -> Question[ChatChunk]:
        """How the server is asked for a chat."""

    @abstractmethod
    async def _likeliest(self, probe: GenerateRequest) -> float:
        """The logprob of the token that most probably follows the prompt, as a session would get it."""

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        """Sample one token: whether ids and logprobs come back shows only in an answer."""
        is_chat = mode is Mode.CHAT
        try:
            problem = await (self._try_chat() if is_chat else self._try_tokens())
            if problem is not None:
                raise EngineError(problem)
        except EngineDown:
            raise
        except EngineError as error:
            raise EngineError(
                f"the engine at {self.url} cannot be used: {error}", hint=f"it must be {self._needed(mode)}"
            ) from error
        self._logprobs_mode = await self._shown_logprobs_mode()
        if is_chat:
            try:
                await self._try_chat(_PROBE_TOOL)
            except NotAccepted as error:
                # Agents without tools do without.
                log.warning("the engine at %s refuses requests with tools: %s", self.url, error)

    async def _try_tokens(self) -> str | None:
        """What is wrong with a sampled token, if anything."""
        async with aclosing(self.generate(_probe(temperature=1.0))) as chunks:
            got = [chunk async for chunk in chunks]
        if not any(chunk.ids for chunk in got):
            return "it samples without returning token ids"
        if self._records_routing:
            if got[-1].routing is None:
                return "it does not tell which experts tokens went to (engine.record_routing)"
            self._experts = got[-1].routing[0].size
        return None

    def _needed(self, mode: Mode) -> str:
        if mode is Mode.CHAT:
            return self.chat_requirement
        return self.routing_requirement if self._records_routing else self.requirement

    async def _shown_logprobs_mode(self) -> str | None:
        """Of which distribution logprobs are: the likeliest token is the same at any temperature, and its
        logprob is too where temperature does not count."""
        try:
            cool, hot = [await self._likeliest(_probe(each)) for each in PROBE_TEMPERATURES]
        except EngineDown:
            raise
        except (EngineError, LookupError, TypeError, ValueError, AttributeError) as error:
            log.info("the engine at %s does not show of what its logprobs are: %r", self.url, error)
            return None
        if abs(cool - hot) > PROBE_TOLERANCE:
            return PROCESSED
        # Of a token that is certain, both are 0.
        return RAW if cool < -PROBE_TOLERANCE else None

    async def count_tokens(self, chat: ChatRequest) -> int | None:
        # Servers whose /tokenize takes only text refuse this.
        count = await self._tokenized(chat_wire.prompt_body(chat, await self._served_name()), "count")
        return count if isinstance(count, int) else None

    async def tokenize(self, text: str) -> list[int] | None:
        ids = await self._tokenized({"prompt": text, "add_special_tokens": False}, "tokens")
        return ids if isinstance(ids, list) else None

    async def _tokenized(self, body: dict[str, Any], field: str) -> Any:
        status, answer = await self._ask("POST", "/tokenize", body)
        try:
            return orjson.loads(answer)[field] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            return None

    async def readings(self) -> dict[str, Readings | None]:
        try:
            status, page = await self._ask("GET", "/metrics", seconds=READINGS_SECONDS)
        except EngineDown:
            return {self.url: None}
        return {self.url: read(page.decode(errors="replace")) if status == 200 else Readings()}

    async def resume(self) -> None:
        status, answer = await self._ask("POST", self.resume_path, {})
        # A server without pauses is not paused.
        if status not in (200, 404):
            raise EngineError(f"the engine at {self.url} does not resume: {reason_in(answer)}")

    def begins_anew(self, update: WeightUpdate) -> bool:
        return update.is_adapter or self._adapter is not None

    def _version_of_tokens(self) -> Callable[[], int]:
        """A request that names an adapter keeps it."""
        version = self.policy_version
        return (lambda: self.policy_version) if self._adapter is None else (lambda: version)

    async def _load_beside(self, update: WeightUpdate, name: str, *, is_replaced: bool) -> None:
        """Load an adapter beside the one before, whose last requests may not have ended, and let older ones
        go. `is_replaced`: whether the weights below it are not the first ones."""
        if is_replaced:
            raise EngineError(
                f"the engine at {self.url} has other weights than the adapter was trained on: its own were"
                " replaced",
                hint="`polar policy update` returns to them, or start it anew",
            )
        loaded = await self._loaded_adapters()
        if loaded.get(name) != update.path:
            if name in loaded:
                # Of the same number, but of another run.
                await self._let_go(name)
            await self._load(name, update.path)
        for old in loaded.keys() - {name, self._adapter}:
            await self._let_go(old)

    async def _load(self, name: str, path: str | None) -> None:
        body = {"lora_name": name, "lora_path": path}
        order = f"{self.adapter_paths}/load_lora_adapter"
        status, answer = await self._ask("POST", order, body, seconds=ORDER_SECONDS)
        # Another client of this engine may have been quicker.
        if status != 200 and (await self._loaded_adapters()).get(name) != path:
            raise EngineError(
                f"the engine at {self.url} does not load the adapter {path}: {reason_in(answer)}",
                hint=self.adapter_needs,
            )

    async def _let_go(self, name: str) -> None:
        order = f"{self.adapter_paths}/unload_lora_adapter"
        try:
            await self._ask("POST", order, {"lora_name": name}, seconds=LET_GO_SECONDS)
        except EngineDown as error:
            log.info("the engine at %s has not let %s go yet: %s", self.url, name, error)

    async def _loaded_adapters(self) -> dict[str, Any]:
        """Ours, by name, with where they come from."""
        cards = (await self._get("/v1/models"))["data"]
        return {card["id"]: card.get("root") for card in cards if card["id"].startswith(ADAPTER)}

    async def _served_model(self) -> tuple[dict[str, Any], int]:
        """The list of models as the server gives it, and the context of the first, whose name is kept."""
        document = await self._get("/v1/models")
        try:
            card = document["data"][0]
            self._model, context = str(card["id"]), int(card["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"the engine at {self.url} lists no model with a max_model_len",
                hint=f"it must be {self.requirement}; for another server say --engine-kind",
            ) from error
        return document, context


def _probe(temperature: float) -> GenerateRequest:
    """Asks for one token, on behalf of no session."""
    sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, max_tokens=1)
    return GenerateRequest(f"check-{uuid4().hex}", [1], sampling)
