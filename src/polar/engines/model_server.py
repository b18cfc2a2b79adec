"""What vLLM and SGLang share: checks at start, tokenisation, pauses, adapters loaded at run time,
and the experts of tokens as they encode them."""

from __future__ import annotations

import base64
import binascii
import io
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
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
from polar.models.completion import Routing
from polar.models.session import PROCESSED, RAW
from polar.telemetry.readings import Readings, read

log = logging.getLogger(__name__)

READINGS_SECONDS = 2.0
"""Timeout for the engine's metrics page, since callers of ours have one too."""
PAUSE_PATIENCE_SECONDS = 60.0
"""Seconds before a pause found at start is taken for abandoned."""
PROBE_TEMPERATURES = (1.0, 2.0)
"""Temperatures of the check that finds whether logprobs are after temperature."""
PROBE_TOLERANCE = 0.05
"""Logprobs of one token within this tolerance are equal, as engines round and sum in any order."""
UNLOAD_SECONDS = 2.0
"""Timeout of an unload: SGLang first waits for others' requests to end."""
ADAPTER = "polar-"
"""Prefix of adapter names; the version follows and, for vLLM, a suffix unique to this client."""
_PROBE_TOOL = ToolDefinition("probe", "Does nothing.", {"type": "object", "properties": {}})


class ModelServer(HttpEngine):
    """An inference server that returns ids and logprobs of sampled tokens."""

    chat_requirement: ClassVar[str]
    """Hint on what the server needs for chat mode."""
    resume_path: ClassVar[str]
    routing_requirement: ClassVar[str]
    """Hint on what it needs to report routing."""
    adapter_paths: ClassVar[str]
    """Prefix of `/load_lora_adapter` and `/unload_lora_adapter`."""
    adapter_needs: ClassVar[str]
    """Hint on how to start the server with adapters."""

    _adapter: str | None = None
    """Name of the current adapter; None for the model's own weights."""
    _known_in = 0
    """The connections' epoch at the last version check."""
    _logprobs_mode: str | None = None
    """The result of `check`."""

    def __init__(
        self, url: str, api_key: str | None = None, *, record_routing: bool = False, **settings: Any
    ) -> None:
        super().__init__(url, api_key, **settings)
        self._records_routing = record_routing
        self._experts: int | None = None
        """Experts per token over all layers, as found by `check`."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        return self._answer(request, self._tokens_of)

    def chat(self, call: ChatCall) -> AsyncGenerator[ChatChunk, None]:
        return self._answer(call, self._chat_of)

    @abstractmethod
    async def _tokens_of(self, request: GenerateRequest) -> Question[TokenChunk]:
        """Build the request for tokens."""

    @abstractmethod
    async def _chat_of(self, call: ChatCall) -> Question[ChatChunk]:
        """Build the request for a chat."""

    @abstractmethod
    async def _likeliest(self, probe: GenerateRequest) -> float | None:
        """Return the logprob of the likeliest next token, as a session would get it; None if not offered."""

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        """Sample one token, as only an answer shows whether ids and logprobs come back."""
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
        """Return what is wrong with a sampled token, if anything."""
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
        """Find whether logprobs are after temperature, by whether the likeliest token's changes with it."""
        try:
            cool, hot = [await self._likeliest(_probe(each)) for each in PROBE_TEMPERATURES]
        except EngineDown:
            raise
        except (EngineError, LookupError, TypeError, ValueError, AttributeError) as error:
            log.info("the engine at %s does not show of what its logprobs are: %r", self.url, error)
            return None
        if cool is None or hot is None:
            return None
        if abs(cool - hot) > PROBE_TOLERANCE:
            return PROCESSED
        # Of a token that is certain, both are 0.
        return RAW if cool < -PROBE_TOLERANCE else None

    async def count_tokens(self, chat: ChatRequest) -> int | None:
        # Servers whose /tokenize takes only text refuse this.
        count = await self._tokenize(chat_wire.prompt_body(chat, await self._served_name()), "count")
        return count if isinstance(count, int) else None

    async def tokenize(self, text: str) -> list[int] | None:
        ids = await self._tokenize({"prompt": text, "add_special_tokens": False}, "tokens")
        return ids if isinstance(ids, list) else None

    async def _tokenize(self, body: dict[str, Any], field: str) -> Any:
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

    def must_drain(self, update: WeightUpdate) -> bool:
        return update.is_adapter or self._adapter is not None

    def _version_of_tokens(self) -> Callable[[], int]:
        """The version of a request's tokens; a request keeps the adapter it names."""
        version = self.policy_version
        return (lambda: self.policy_version) if self._adapter is None else (lambda: version)

    async def _load_beside(self, update: WeightUpdate, name: str, *, is_replaced: bool) -> None:
        """Load an adapter beside the current one, whose last requests may be running, and unload older ones.
        `is_replaced`: whether the base weights are not the initial ones."""
        if is_replaced:
            raise EngineError(
                f"the engine at {self.url} has other weights than the adapter was trained on: its own were"
                " replaced",
                hint="`polar policy update` returns to them, or restart it",
            )
        loaded = await self._loaded_adapters()
        if loaded.get(name) != update.path:
            if name in loaded:
                # Of the same number, but of another run.
                await self._unload_adapter(name)
            await self._load(name, update.path)
        for old in loaded.keys() - {name, self._adapter}:
            await self._unload_adapter(old)

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

    async def _unload_adapter(self, name: str) -> None:
        order = f"{self.adapter_paths}/unload_lora_adapter"
        try:
            await self._ask("POST", order, {"lora_name": name}, seconds=UNLOAD_SECONDS)
        except EngineDown as error:
            log.info("the engine at %s has not unloaded %s yet: %s", self.url, name, error)

    async def _loaded_adapters(self) -> dict[str, Any]:
        """Our adapters' paths by name."""
        cards = (await self._get("/v1/models"))["data"]
        return {card["id"]: card.get("root") for card in cards if card["id"].startswith(ADAPTER)}

    async def _served_model(self) -> tuple[dict[str, Any], int]:
        """Return the server's list of models and the first one's context; remember its name."""
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
    """A request for one token, outside any session."""
    sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, max_tokens=1)
    return GenerateRequest(f"check-{uuid4().hex}", [1], sampling)


def routing_from_npy(text: str, rows: int, width: int | None) -> Routing | None:
    """vLLM's format of the experts of tokens: a numpy file of [tokens, layers, experts].

    `width`: numbers per token, if known.
    """
    try:
        told = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        log.warning("an engine told experts that cannot be read: %s", error)
        return None
    return _compact(told, rows, width)


def routing_from_numbers(text: str, rows: int, width: int | None) -> Routing | None:
    """SGLang's format: bare numbers of four bytes each. The layer count is not included, so all experts of a
    token stand in one layer until a reader that knows the number per layer separates them."""
    try:
        told = np.frombuffer(base64.b64decode(text), "<i4").reshape(rows, 1, width or -1)
    except (binascii.Error, ValueError) as error:
        log.warning("an engine told experts of other tokens than it sampled: %s", error)
        return None
    return _compact(told, rows, width)


def _compact(told: np.ndarray[Any, np.dtype[Any]], rows: int, width: int | None) -> Routing | None:
    """The smallest type that holds the numbers; None if they do not fit the tokens."""
    is_whole = told.ndim == 3 and len(told) == rows and told[0].size == (width or told[0].size)
    if not told.size or not is_whole or told.dtype.kind not in "iu":
        log.warning("an engine told the experts of %s %s for %d tokens", told.dtype, told.shape, rows)
        return None
    if told.min() < 0 or told.max() > np.iinfo(np.uint16).max:
        log.warning("an engine told experts that have no number: %d to %d", told.min(), told.max())
        return None
    return told.astype(np.uint8 if told.max() <= np.iinfo(np.uint8).max else np.uint16)
