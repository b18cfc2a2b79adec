"""Client of SGLang's native generation API, with token ids in and out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import orjson

from polar.engines import chat_wire, transfer
from polar.engines.base import (
    ChatCall,
    ChatChunk,
    EngineDown,
    EngineError,
    GenerateRequest,
    Mode,
    ModelInfo,
    RequestUnfit,
    TokenChunk,
    WeightUpdate,
)
from polar.engines.http import Asked, Chunk, Question, TokenReader, reason_in
from polar.engines.model_server import ADAPTER, PAUSE_PATIENCE_SECONDS, ModelServer, routing_from_numbers
from polar.models.chat import FinishReason
from polar.models.completion import Routing
from polar.models.policy import PauseMode

log = logging.getLogger(__name__)

ABORT_SECONDS = 2.0
"""Seconds to wait for the server to acknowledge an abort."""

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_PAUSES = {PauseMode.KEEP: "retract", PauseMode.DRAIN: "retract", PauseMode.ABORT: "abort"}
"""Requests that are retracted go back to the queue with their tokens, and are computed anew after the pause:
in place they would keep what the old weights computed, and the cache could not be flushed."""
_ON_TOP = "+adapter-"
"""Separates the base weights' version from the adapter's in the name of the weights, so that the tokens of
either get the right one whichever client asked for them."""
_PAUSABLE = "it must be SGLang 0.5 or newer, reached directly"


class SglangEngine(ModelServer):
    requirement = "SGLang 0.5 or newer, reached directly: its router may strip token ids"
    chat_requirement = (
        "SGLang 0.5.17 or newer, whose chat API returns token ids, reached directly: its router strips them;"
        " or set engine.mode to tokens"
    )
    routing_requirement = (
        "SGLang 0.5.12 or newer with a mixture of experts, started with --enable-return-routed-experts, and"
        " reached directly"
    )
    resume_path = "/continue_generation"
    adapter_paths = ""
    adapter_needs = (
        "start SGLang with --enable-lora --max-loras-per-batch 2, a --max-lora-rank not below the adapter's,"
        " and --lora-target-modules all, or train all weights"
    )

    _first_name: str | None = None
    _first_path: str | None = None
    """Name and path of the initial weights, until they are replaced."""
    _path: str | None = None
    """Path of its weights, without any adapter."""
    _is_replaced = False
    """Whether SGLang has other than its initial weights, without any adapter."""
    _base_version = 0
    """Version of the weights, without any adapter."""

    def __init__(self, url: str, api_key: str | None = None, **settings: Any) -> None:
        super().__init__(url, api_key, **settings)
        self._asked = 0
        """Number of running generations."""
        self._answered = asyncio.Event()

    async def _answer(
        self, asked: Asked, question: Callable[[Asked], Awaitable[Question[Chunk]]]
    ) -> AsyncGenerator[Chunk, None]:
        has_ended = False
        adapter = self._adapter
        self._asked += 1
        try:
            async with aclosing(super()._answer(asked, question)) as chunks:
                async for chunk in chunks:
                    has_ended = chunk.finish_reason is not None
                    yield chunk
        except RequestUnfit:
            if adapter is not None and not await self._samples_with(adapter):
                raise EngineDown(f"the engine at {self.url} no longer samples with {adapter}") from None
            raise
        except (GeneratorExit, asyncio.CancelledError):
            if not has_ended:
                await self._abort(asked.request_id)
            raise
        finally:
            self._asked -= 1
            if not self._asked:
                self._answered.set()

    async def _tokens_of(self, request: GenerateRequest) -> Question[TokenChunk]:
        body = _request_body(request) | await self._adapter_fields()
        if self._records_routing:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.routed_from}
        rows = len(request.prompt_ids) - request.routed_from
        version, named = self._version_of_tokens(), self._reads_version()
        return Question("/generate", body, _SglangReader(self.url, version, named, rows, self._experts))

    async def _chat_of(self, call: ChatCall) -> Question[ChatChunk]:
        """Build the request, never streaming: SGLang returns token ids only with whole chats."""
        body = _chat_body(call, await self._served_name()) | await self._adapter_fields()
        version, named = self._version_of_tokens(), self._reads_version()
        return Question(
            chat_wire.PATH, body, chat_wire.ChatReader(self.url, version, call.sampling.stop, named=named)
        )

    async def _adapter_fields(self) -> dict[str, str]:
        """Fields of a request that select the current adapter, if there is one."""
        epoch = self._connections.epoch
        if self._adapter is not None and epoch != self._known_in:
            # SGLang may have restarted without it.
            await self.model_info()
            self._known_in = epoch
        return {} if self._adapter is None else {"lora_path": self._adapter}

    async def _samples_with(self, adapter: str) -> bool:
        await self.model_info()
        return self._adapter == adapter

    def _reads_version(self) -> Callable[[Any], int]:
        """Return the parser of token versions for new requests."""
        return chat_wire.weight_version if self._adapter is None else _adapters_version(self.policy_version)

    async def score(self, ids: list[int]) -> list[float]:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            # Left out, logprobs begin where the prompt ends.
            "logprob_start_len": 0,
            "stream": False,
        }
        body |= await self._adapter_fields()
        return _prompt_logprobs(await self._document("/generate", body), ids)

    async def _likeliest(self, probe: GenerateRequest) -> float:
        body = _request_body(probe) | {"stream": False, "top_logprobs_num": 1}
        answer = await self._document("/generate", body)
        return float(answer["meta_info"]["output_top_logprobs"][0][0][0])

    async def model_info(self) -> ModelInfo:
        # Not /server_info: its context_length is null unless it was given on the command line.
        _, context = await self._served_model()
        info = await self._get("/model_info", older="/get_model_info")
        # A restarted server has its initial weights and no version.
        named = str(info.get("weight_version"))
        adapter = named.partition(_ON_TOP)[2]
        self._adapter = f"{ADAPTER}{adapter}" if adapter.isdecimal() else None
        self.policy_version = chat_wire.weight_version(named if self._adapter is None else adapter)
        self._is_replaced, self._base_version = named.isdecimal(), chat_wire.weight_version(named)
        self._path = info.get("model_path")
        if not self._is_replaced:
            self._first_path = self._path
        if not self._base_version:
            self._first_name = self._model
        # After an update it calls itself by the path of the new weights.
        name = self._first_name or info.get("tokenizer_path") or self._model
        # SGLang refuses a prompt and max_new_tokens that together fill the context to the last token.
        return ModelInfo(
            name,
            context - 1,
            self.policy_version,
            self._logprobs_mode,
            records_routing=self._records_routing,
        )

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.DRAIN:
            # SGLang itself cannot wait for what is being sampled: what was asked for from here can be.
            while self._asked:
                self._answered.clear()
                await self._answered.wait()
        await self._order("/pause_generation", {"mode": _PAUSES[mode]}, needs=_PAUSABLE)

    async def update_weights(self, update: WeightUpdate) -> None:
        if (await self.model_info()).policy_version == update.version and await self._has(update.path):
            return
        first = f"{update.version}+first"
        if update.is_adapter:
            name = f"{ADAPTER}{update.version}"
            await self._load_beside(update, name, is_replaced=self._is_replaced)
            await self._name_weights(f"{self._base_version}{_ON_TOP}{update.version}")
            self._adapter = name
        elif update.path is None and self._adapter is not None:
            # The model's own weights are there as they were.
            await self._name_weights(first)
            self._adapter = None
        elif update.path is None:
            await self._reload(self._first_weights(), first)
        else:
            await self._reload(update.path, str(update.version))
        self.policy_version = update.version

    async def _has(self, path: str | None) -> bool:
        """Whether these weights are in use; another run's may have the same version."""
        if self._adapter is not None:
            return (await self._loaded_adapters()).get(self._adapter) == path
        return not self._is_replaced if path is None else self._path == path

    async def _name_weights(self, name: str) -> None:
        # Unless told otherwise, it would end all that is being sampled.
        body = {"new_version": name, "abort_all_requests": False}
        await self._order("/update_weight_version", body, needs=_PAUSABLE)

    async def _reload(self, path: str, name: str) -> None:
        with transfer.reading(path) as shared:
            if shared is not None:
                # Of files that are being written, SGLang would load those that are there.
                raise EngineError(f"the weights at {path} are on the trainer's GPU, and not in files yet")
        body = {"model_path": path, "weight_version": name, "flush_cache": True}
        answer = await self._order("/update_weights_from_disk", body, needs=_PAUSABLE)
        try:
            said = orjson.loads(answer)
            is_done, reason = said["success"], said.get("message")
        except (ValueError, KeyError, TypeError):
            is_done, reason = False, reason_in(answer)
        if not is_done:
            raise EngineError(f"the engine at {self.url} keeps its weights: {reason}")
        self._adapter = None

    def _first_weights(self) -> str:
        if self._first_path is None:
            raise EngineError(
                f"the engine at {self.url} no longer says which weights it was started with",
                hint="restart SGLang, or name the weights to load",
            )
        return self._first_path

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        resuming = asyncio.create_task(self._end_pause_left_behind())
        try:
            await super().check(mode)
        finally:
            resuming.cancel()
        if mode is Mode.CHAT:
            return
        info = await self._get("/server_info", older="/get_server_info")
        if not (info.get("incremental_streaming_output") or info.get("stream_output")):
            log.warning(
                "the SGLang server at %s repeats all earlier tokens with each new one, which makes long"
                " answers slow: start it with --incremental-streaming-output",
                self.url,
            )

    async def _end_pause_left_behind(self) -> None:
        """SGLang does not tell that it is paused, as by a node that was killed: it answers nothing then."""
        await asyncio.sleep(PAUSE_PATIENCE_SECONDS)
        log.warning("the engine at %s samples nothing: it is resumed, should it be paused", self.url)
        try:
            await self.resume()
        except EngineError as error:
            log.warning("%s", error)

    async def _abort(self, rid: str) -> None:
        """Abort explicitly, as the server notices a closed connection only on its next write."""
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self._ask("POST", "/abort_request", {"rid": rid})
        except (EngineError, TimeoutError) as error:
            log.info("the engine at %s could not be told to abort %s: %s", self.url, rid, error)


class _SglangReader(TokenReader):
    """An event holds all tokens so far, or only the new ones where the server streams incrementally;
    the server's own count of tokens tells which."""

    _version = 0
    _sampled_before = 0
    """Number of tokens sampled before the last weight update."""

    def __init__(
        self,
        url: str,
        version: Callable[[], int],
        named: Callable[[Any], int] = chat_wire.weight_version,
        prompt_rows: int = 0,
        experts: int | None = None,
    ) -> None:
        super().__init__(url, version)
        self._named_version = named
        self._prompt_rows = prompt_rows
        """Number of prompt tokens whose experts are requested."""
        self._experts = experts
        """Experts per token over all layers, if known."""

    def read(self, event: dict[str, Any]) -> TokenChunk | None:
        self.raise_error(event, status=400)
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            raise EngineError("the engine sent an event without meta_info")
        if self._held is not None:
            raise EngineError("the engine went on after it had ended the completion")
        finish = self._finish(meta.get("finish_reason"))
        ids, logprobs = self._new_tokens(event, meta, is_last=finish is not None)
        self._tokens += len(ids)
        named = meta.get("weight_version")
        # Where the server does not say, the version is the last that is known.
        known = max(self._version, self._known_version())
        version = known if named is None else self._named_version(named)
        if version != self._version:
            self._version, self._sampled_before = version, self._tokens - len(ids)
        cached = int(meta.get("cached_tokens") or 0)
        routing = self._routing(meta.get("routed_experts"))
        chunk = TokenChunk(ids, logprobs, self._version, finish, cached, routing)
        if finish is not None:
            self._held = chunk
            return None
        return chunk if ids else None

    def _routing(self, told: Any) -> Routing | None:
        """Omit experts recomputed after a weight update."""
        if not isinstance(told, str):
            return None
        found = routing_from_numbers(told, self._prompt_rows + self._tokens - 1, self._experts)
        if found is None or not self._sampled_before:
            return found
        return found[self._prompt_rows + self._sampled_before - 1 :]

    def _new_tokens(
        self, event: dict[str, Any], meta: dict[str, Any], *, is_last: bool
    ) -> tuple[list[int], list[float]]:
        count = meta.get("completion_tokens")
        if not isinstance(count, int):
            raise EngineError("the engine does not count its completion_tokens")
        ids = self._new(event.get("output_ids"), count, is_last=is_last)
        rows = self._new(meta.get("output_token_logprobs"), count, is_last=is_last)
        try:
            logprobs = [float(row[0]) for row in rows]
            named = [row[1] for row in rows]
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise EngineError(f"the engine sent a token without a usable logprob: {error}") from error
        if ids != named or not all(type(id) is int for id in ids):
            raise EngineError(f"the engine sent {len(ids)} token ids and logprobs of other tokens")
        return ids, logprobs

    def _new(self, items: Any, count: int, *, is_last: bool) -> list[Any]:
        """Return the tokens not passed on yet, from a list of all tokens or of new ones only."""
        if not isinstance(items, list):
            if count == self._tokens:
                return []
            raise EngineError("the engine sent tokens without ids or logprobs")
        # A list of all tokens may run ahead of the count taken before it was written, except at the end.
        is_whole = len(items) == count if is_last else len(items) >= count
        if is_whole:
            return items[self._tokens :]
        if self._tokens + len(items) == count:
            return items
        raise EngineError(
            f"the engine counts {count} sampled tokens but sent {len(items)} after {self._tokens}"
        )

    def _finish(self, reason: Any) -> FinishReason | None:
        if reason is None:
            return None
        detail = reason if isinstance(reason, dict) else {"type": reason}
        kind = detail.get("type")
        if kind in _FINISH:
            return _FINISH[kind]
        # Aborted without a word of blame, as when weights are updated: the same request may succeed.
        status = detail.get("status_code")
        message = f"ended the completion with {kind!r}: {detail.get('message') or 'no reason given'}"
        raise self.failure(status if isinstance(status, int) else 503, message)


def _adapters_version(version: int) -> Callable[[Any], int]:
    """Return the parser of a request with an adapter; it fails if the base weights were replaced
    meanwhile."""

    def read(named: Any) -> int:
        if str(named).isdecimal():
            raise EngineError(f"the weights below adapter {version} were replaced while it was sampled with")
        return version

    return read


def _prompt_logprobs(answer: dict[str, Any], ids: list[int]) -> list[float]:
    try:
        rows = answer["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != ids:
            raise ValueError("token ids do not match the request")
        return [0.0, *(float(row[0]) for row in rows[1:])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"the engine sent no usable input_token_logprobs: {error!r}") from error


def _request_body(request: GenerateRequest) -> dict[str, Any]:
    fields = chat_wire.sampling_fields(request.sampling)
    # Left out, it would be 128.
    limit = fields.pop("max_tokens", None)
    if "seed" in fields:
        fields["sampling_seed"] = fields.pop("seed")
    constraint = request.constraint
    wishes = {
        "stop_token_ids": list(request.stop_token_ids) or None,
        "json_schema": constraint.json_schema if constraint else None,
        "structural_tag": constraint.structural_tag if constraint else None,
    }
    return {
        "rid": request.request_id,
        "input_ids": request.prompt_ids,
        "stream": True,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": limit,
            "no_stop_trim": True,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **_neutral(fields),
            **{name: value for name, value in wishes.items() if value is not None},
        },
    }


def _chat_body(call: ChatCall, model: str) -> dict[str, Any]:
    return _neutral(chat_wire.request_body(call, model, stream=False)) | {
        "rid": call.request_id,
        "logprobs": True,
        # Versions differ in which of them gives the prompt's ids.
        "return_token_ids": True,
        "return_prompt_token_ids": True,
        "return_meta_info": True,
    }


def _neutral(fields: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters sent explicitly, as servers may have other defaults. SGLang's top_k for "all" is
    -1, not 0."""
    if fields.get("top_k") == 0:
        fields["top_k"] = -1
    return fields | {"min_p": 0.0, "repetition_penalty": 1.0}
