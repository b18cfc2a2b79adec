"""Client of an engine that speaks vLLM's completions API with token ids in and out."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import orjson

from polar.engines import chat_wire, nccl, transfer
from polar.engines.base import (
    HALF_REPLACED,
    ChatCall,
    ChatChunk,
    EngineDown,
    EngineError,
    GenerateRequest,
    Mode,
    ModelInfo,
    TokenChunk,
    WeightUpdate,
)
from polar.engines.http import ORDER_SECONDS, Question, TokenReader, reason_in
from polar.engines.model_server import ADAPTER, PAUSE_PATIENCE_SECONDS, ModelServer, routing_from_npy
from polar.files import digest
from polar.models.chat import FinishReason
from polar.models.completion import Routing
from polar.models.policy import PauseMode
from polar.rendering.constraints import Constraint

log = logging.getLogger(__name__)

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_PAUSES = {PauseMode.KEEP: "keep", PauseMode.DRAIN: "wait", PauseMode.ABORT: "abort"}
_DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"
_IPC = (
    """start vLLM with VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_INSECURE_SERIALIZATION=1 and"""
    """ --weight-transfer-config '{"backend": "ipc"}', on the trainer's GPU"""
)
_NCCL = (
    """start vLLM 0.24 or newer with VLLM_SERVER_DEV_MODE=1 and"""
    """ --weight-transfer-config '{"backend": "nccl"}', on another GPU than the trainer's"""
)

GENERATE = "/inference/v1/generate"
"""Tokens in and out with their experts, also in a stream: completions tell those in one piece only."""
_OURS = {"return_token_ids": True, "min_p": 0.0, "repetition_penalty": 1.0}
"""Fields of every request, which vLLM would otherwise fill from the model's generation_config."""
_REPLACING = "+replacing-"
"""Separates, in the name of weights during an update, the next version from the client that loads it."""
SETTLE_SECONDS = 0.05
"""Seconds before a client checks that no other named the weights at the same time."""
LOOK_SECONDS = 0.1
_FIRST = "first"
"""Name of the initial weights of a vLLM without names for weights."""
_STARTED = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)


class VllmEngine(ModelServer):
    requirement = "polar engine, or vLLM 0.10.2 or newer, which returns token ids and logprobs"
    chat_requirement = (
        "polar engine, or vLLM 0.10.2 or newer with a chat template, reached directly: a router may strip ids"
    )
    routing_requirement = (
        "vLLM 0.24 or newer with a mixture of experts, started with --enable-return-routed-experts, and"
        " reached directly"
    )
    resume_path = "/resume"
    adapter_paths = "/v1"
    adapter_needs = (
        "start vLLM with --enable-lora --max-loras 2, a --max-lora-rank not below the adapter's, and"
        " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or train all weights"
    )

    _root: str | None = None
    """Path of vLLM's initial weights."""
    _names_version = False
    """Whether it is `polar engine`, which reports the version of each token."""
    _named: tuple[bytes, str] | None = None
    """(start time, name of the weights) for a vLLM without names for weights."""
    _joined: tuple[str, bytes] | None = None
    """The trainer of vLLM's current NCCL group, and vLLM's start time."""

    @cached_property
    def _id(self) -> str:
        """Identifies this client among others of the same engine."""
        return uuid4().hex[:12]

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        return self._routed(request) if self._records_routing else super().generate(request)

    async def _routed(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        sampled: list[int] = []
        version, before = None, 0
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.ids and chunk.policy_version != version:
                    version, before = chunk.policy_version, len(sampled)
                sampled += chunk.ids
                is_lost = chunk.finish_reason is not None and chunk.routing is None
                if is_lost and version == self.policy_version:
                    kept = await self._recover_routing(request, sampled, before)
                    # A pause may have held the question until other weights were there.
                    chunk = replace(chunk, routing=kept if version == self.policy_version else None)
                yield chunk

    async def _recover_routing(
        self, request: GenerateRequest, sampled: list[int], before: int
    ) -> Routing | None:
        """Ask for the experts that vLLM 0.24 leaves out of a stream whose last tokens it sent together.

        Only tokens still in the prefix cache count: the experts of any others would be computed anew. The
        `before` tokens sampled before a weight update are left out, since the cache was recomputed after it.
        """
        ids, start = [*map(int, request.prompt_ids), *sampled[:-1]], request.routed_from
        if before:
            start = len(request.prompt_ids) + before - 1
        try:
            body = {
                "model": await self._sampled_name(request.session),
                "token_ids": ids,
                # Only in a stream does vLLM 0.24 say how much was cached.
                "stream": True,
                "stream_options": {"include_usage": True},
                "sampling_params": {"max_tokens": 1, "routed_experts_prompt_start": start},
            }
            told, cached = None, 0
            async with aclosing(self._events(GENERATE, body)) as arrivals:
                async for events in arrivals:
                    for each in events:
                        told = each["choices"][0]["routed_experts"] if each["choices"] else told
                        details = (each.get("usage") or {}).get("prompt_tokens_details") or {}
                        cached = int(details.get("cached_tokens") or cached)
        except (EngineError, KeyError, IndexError, TypeError) as error:
            log.info("the engine at %s did not say the experts of an answer: %r", self.url, error)
            return None
        if told is None or cached <= start:
            return None
        routing = routing_from_npy(told, len(ids) - start, self._experts)
        if routing is not None:
            routing[cached - start :] = 0
        return routing

    async def _tokens_of(self, request: GenerateRequest) -> Question[TokenChunk]:
        body = _request_body(request, await self._sampled_name(request.session))
        if self._records_routing:
            reader = _RoutedReader(self.url, self._version_of_tokens(), request, self._experts)
            return Question(GENERATE, _routed_body(body, request), reader)
        return Question("/v1/completions", body, _VllmReader(self.url, self._version_of_tokens()))

    async def _chat_of(self, call: ChatCall) -> Question[ChatChunk]:
        body = chat_wire.request_body(call, await self._sampled_name(call.session), stream=call.chat.stream)
        body |= _OURS | {"logprobs": True, "request_id": call.request_id}
        reader = chat_wire.ChatReader(self.url, self._version_of_tokens(), call.sampling.stop)
        return Question(chat_wire.PATH, body, reader)

    async def score(self, ids: list[int]) -> list[float]:
        body = {
            "model": await self._sampled_name(),
            "prompt": ids,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "stream": False,
        }
        return _prompt_logprobs(await self._document("/v1/completions", body), ids)

    async def _likeliest(self, probe: GenerateRequest) -> float | None:
        body = _request_body(probe, await self._served_name()) | {"stream": False}
        del body["stream_options"]
        answer = await self._document("/v1/completions", body)
        likeliest = answer["choices"][0]["logprobs"]["top_logprobs"]
        return None if likeliest is None else float(max(likeliest[0].values()))

    async def _sampled_name(self, session: str = "") -> str:
        """The model name that selects the current weights."""
        # Checks have no session; a session's tokens must have a version.
        if session and self.policy_version == HALF_REPLACED:
            raise EngineDown(f"the engine at {self.url} is in the middle of a weight update")
        if self._adapter is not None:
            await self._recognise()
        return self._adapter or await self._served_name()

    async def model_info(self) -> ModelInfo:
        document, context = await self._served_model()
        card = document["data"][0]
        version = card.get("policy_version", document.get("policy_version"))
        self._names_version = version is not None
        self._root = card.get("root")
        self.policy_version = await self._last_version() if version is None else int(version)
        # Believed only where `check` could not see it.
        mode = self._logprobs_mode or card.get("logprobs_mode")
        return ModelInfo(
            self._model,
            context,
            self.policy_version,
            None if mode is None else str(mode),
            records_routing=self._records_routing,
        )

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        await self._outlast_pause()
        await super().check(mode)

    async def pause(self, mode: PauseMode) -> None:
        # Replacing the weights clears the cache, including that of kept requests.
        await self._order(f"/pause?mode={_PAUSES[mode]}&clear_cache=false", needs=_DEV_MODE)

    async def update_weights(self, update: WeightUpdate) -> None:
        if await self._another_loads(update.version):
            self._adapter = None
        else:
            await self.model_info()
            if self._names_version:
                await self._order("/load_weights", {"version": update.version, "path": update.path}, needs="")
            elif self.policy_version != update.version:
                await self._replace(update)
        self.policy_version = update.version

    def must_drain(self, update: WeightUpdate) -> bool:
        return not self._names_version and super().must_drain(update)

    async def _replace(self, update: WeightUpdate) -> None:
        if update.is_adapter:
            await self._load_adapter(update)
        elif update.path is None and self._adapter is not None:
            # The model's own weights are there as they were.
            if await self._weight_name() is not None:
                await self._name_weights(f"{update.version}+first")
            self._adapter = None
        else:
            await self._reload(update)
            self._adapter = None

    async def _load_adapter(self, update: WeightUpdate) -> None:
        named = await self._weight_name()
        is_replaced = named is not None and (named.isdecimal() or _REPLACING in named)
        # vLLM finds what it has cached by the adapter's name, also of one that is gone, and all runs count
        # from 1.
        content = await asyncio.to_thread(digest, Path(update.path or ""))
        name = f"{ADAPTER}{update.version}-{content[:12]}"
        await self._load_beside(update, name, is_replaced=is_replaced)
        # Where vLLM (before 0.32) has no names for weights, the adapter's own is enough: a restarted server
        # does not know it, and refuses the request.
        if named is not None:
            await self._name_weights(f"{update.version}+{name}")
        self._adapter = name

    async def _name_weights(self, name: str) -> bool:
        """Name the weights; return whether other clients can see the name."""
        status, answer = await self._ask("POST", "/update_weight_version", {"new_version": name})
        if status == 404 and (started := await self._started()):
            # Before 0.32. The name is lost with this client, and then the weights are loaded again.
            self._named = started, name
        elif status != 200:
            raise EngineError(
                f"the engine at {self.url} cannot name its weights: {reason_in(answer)}", hint=_DEV_MODE
            )
        return status == 200

    async def _reload(self, update: WeightUpdate) -> None:
        self._refuse_bad_path(update.path)
        with transfer.reading(update.path) as shared:
            if await self._reload_from(update, shared):
                return
        await transfer.in_files(update.path)
        await self._reload_from(update, None)

    async def _reload_from(self, update: WeightUpdate, shared: dict[str, Any] | None) -> bool:
        """Whether vLLM has the weights; otherwise it waits for files. `shared`: the trainer's manifest of
        weights that are not in files."""
        # An interrupted update must not pass for the old weights.
        mine = f"{update.version}{_REPLACING}{self._id}"
        if await self._name_weights(mine):
            await asyncio.sleep(SETTLE_SECONDS)
            if await self._weight_name() != mine:
                # Twice at once, one would end the other's pause.
                if await self._another_loads(update.version, was_seen=True):
                    return True
                await self._name_weights(mine)
        began = time.monotonic()
        way = await self._take(update.path, shared)
        if way is None:
            return False
        log.info(
            "weights %d reached %s over %s in %.2f s", update.version, self.url, way, time.monotonic() - began
        )
        # Requests kept by a pause hold cache blocks, which are recomputed too.
        await self._order("/reset_prefix_cache?reset_running_requests=true", needs=_DEV_MODE)
        # Last, so that under the new name nothing is left of the old weights.
        await self._name_weights(str(update.version) if update.path else f"{update.version}+first")
        return True

    async def _take(self, path: str | None, shared: dict[str, Any] | None) -> str | None:
        """Receive the weights; return how, or None if vLLM cannot use NCCL."""
        if shared is None:
            # Left out, the path would be the last one.
            body = {"method": "reload_weights", "kwargs": {"weights_path": path or self._root}}
            await self._order("/collective_rpc", body, needs=_DEV_MODE)
            return "files"
        if "nccl" not in shared:
            await self._begin_transfer(_IPC)
            await self._order("/update_weights", {"update_info": shared["update_info"]}, needs=_IPC)
            await self._order("/finish_weight_update", needs=_IPC)
            return "CUDA IPC"
        try:
            await self._receive(shared["nccl"], shared["update_info"])
        except EngineDown:
            raise
        except EngineError as error:
            reason = f"{error.message}; {error.hint or _NCCL}"
            log.warning("%s takes no weights over NCCL and waits for files: %s", self.url, reason)
            return None
        return "NCCL"

    async def _begin_transfer(self, needs: str) -> None:
        status, _ = await self._ask("POST", "/start_weight_update", {}, seconds=ORDER_SECONDS)
        if status != 200:
            # An interrupted one may still be running.
            await self._ask("POST", "/finish_weight_update", seconds=ORDER_SECONDS)
            await self._order("/start_weight_update", {}, needs=needs)

    async def _receive(self, told: dict[str, Any], update_info: dict[str, Any]) -> None:
        """Receive weights from the trainer, joining its group first if needed."""
        workers, started = await self._workers(), await self._started()
        joined = (told["secret"], started) if started is not None else None
        is_joined, self._joined = joined is not None and self._joined == joined, None
        async with nccl.trainer_at(told) as trainer:
            trainer.send(
                secret=told["secret"],
                offer=told["offer"],
                client=self._id,
                started=started and started.decode(),
                workers=workers,
                is_joined=is_joined,
            )
            answer = await trainer.receive(nccl.ANSWER_SECONDS)
            if answer["init_info"] is not None:
                await self._meet(trainer, answer)
            await self._begin_transfer(_NCCL)
            trainer.send(begin=True)
            try:
                order = self._order("/update_weights", {"update_info": update_info}, needs=_NCCL)
                await trainer.receive_during(order, nccl.SEND_SECONDS)
            except nccl.PeerGone as error:
                raise EngineDown(
                    f"the engine at {self.url} was being sent weights: {error}",
                    hint="restart it: it waits for them until it ends",
                ) from error
            await self._order("/finish_weight_update", needs=_NCCL)
            trainer.send(done=True)
            # One that ends now has sent all there was.
            with suppress(nccl.PeerGone):
                await trainer.receive(nccl.ANSWER_SECONDS)
                self._joined = joined

    async def _meet(self, trainer: nccl.Peer, answer: dict[str, Any]) -> None:
        # Of the trainer before. vLLM before 0.32 keeps its memory.
        await self._ask("POST", "/shutdown_weight_transfer_engine", seconds=ORDER_SECONDS)
        order = self._order("/init_weight_transfer_engine", answer, needs=_NCCL)
        await trainer.receive_during(order, nccl.MEET_SECONDS)

    async def _workers(self) -> int:
        """Number of vLLM's worker processes."""
        status, answer = await self._ask("GET", "/get_world_size")
        if status != 200:
            raise EngineError(f"the engine at {self.url} answers {status} to /get_world_size", hint=_NCCL)
        return int(orjson.loads(answer)["world_size"])

    def _refuse_bad_path(self, path: str | None) -> None:
        """Check the path if visible from here, as unreadable weights end vLLM."""
        is_here = urlsplit(self.url).hostname in ("127.0.0.1", "::1", "localhost")
        # In this order: when the manifest goes, the files are there.
        names = (transfer.MANIFEST, "*.safetensors")
        if path is not None and is_here and not any(any(Path(path).glob(name)) for name in names):
            raise EngineError(f"the weights at {path} cannot be read: the directory holds no safetensors")

    async def _last_version(self) -> int:
        """Return the version of the last loaded weights; 0 if none since its start."""
        named = await self._weight_name()
        if named is not None and _REPLACING in named:
            # Weights that are here already are replaced by themselves, by another client of this engine.
            if named.partition(_REPLACING)[0] != str(self.policy_version):
                self.policy_version = HALF_REPLACED
        elif named is not None and self.policy_version:
            version, _, adapter = named.partition("+")
            self.policy_version = int(version) if version.isdecimal() else 0
            self._adapter = adapter if adapter.startswith(ADAPTER) else None
        return self.policy_version

    async def _another_loads(self, version: int, *, was_seen: bool = False) -> bool:
        """Wait while another client loads this version; return whether it was seen to and has succeeded."""
        deadline = asyncio.get_running_loop().time() + PAUSE_PATIENCE_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            found, replacing, who = (await self._weight_name() or "").partition(_REPLACING)
            if not replacing or who == self._id or found != str(version):
                return was_seen and not replacing and found.partition("+")[0] == str(version)
            was_seen = True
            await asyncio.sleep(LOOK_SECONDS)
        return False

    async def _weight_name(self) -> str | None:
        """The name of vLLM's weights; None if unknown."""
        status, answer = await self._ask("GET", "/weight_info")
        try:
            if status == 200:
                return str(orjson.loads(answer)["weight_version"])
        except (ValueError, KeyError, TypeError):
            return None
        started = await self._started()
        if started is None:
            return None
        return self._named[1] if self._named is not None and self._named[0] == started else _FIRST

    async def _started(self) -> bytes | None:
        """vLLM's start time by its metrics: a restarted one has its initial weights."""
        status, page = await self._ask("GET", "/metrics")
        found = _STARTED.search(page) if status == 200 else None
        return found[1] if found else None

    async def _recognise(self) -> None:
        """Query the version again if vLLM may have restarted."""
        epoch = self._connections.epoch
        if self.policy_version and not self._names_version and epoch != self._known_in:
            await self._last_version()
            self._known_in = epoch

    async def _outlast_pause(self) -> None:
        """Wait until vLLM is not paused; resume it if the pause seems abandoned."""
        deadline = asyncio.get_running_loop().time() + PAUSE_PATIENCE_SECONDS
        while True:
            status, answer = await self._ask("GET", "/is_paused")
            if status != 200 or b"true" not in answer:
                return
            if asyncio.get_running_loop().time() >= deadline:
                log.warning("the engine at %s was left paused and is resumed", self.url)
                await self.resume()
                return
            await asyncio.sleep(0.2)


class _VllmReader(TokenReader):
    _counted: int | None = None
    """Token count reported by the server."""

    def read(self, event: dict[str, Any]) -> TokenChunk | None:
        self.raise_error(event)
        if usage := event.get("usage"):
            self._read_usage(usage)
        choices = event.get("choices")
        if not choices:
            return None
        chunk = self._chunk(choices[0], int(event.get("policy_version", self._known_version())))
        self._tokens += len(chunk.ids)
        if chunk.finish_reason is not None:
            self._held = chunk
            return None
        return chunk if chunk.ids else None

    def last(self) -> TokenChunk:
        chunk = super().last()
        if self._counted not in (None, self._tokens):
            raise EngineError(
                f"the engine counts {self._counted} sampled tokens but sent {self._tokens} token ids"
            )
        return chunk

    def _read_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict) or self._held is None:
            return
        self._counted = usage.get("completion_tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self._held = replace(self._held, cached_tokens=int(cached))

    def _chunk(self, choice: dict[str, Any], version: int) -> TokenChunk:
        ids = choice.get("token_ids")
        if ids is None:
            if choice.get("text"):
                raise EngineError(
                    "the engine sent text without token ids", hint="it must support return_token_ids"
                )
            ids = []
        logprobs = self._logprobs(choice.get("logprobs") or {})
        if len(ids) != len(logprobs) or None in logprobs:
            raise EngineError(f"the engine sent {len(ids)} token ids with {len(logprobs)} usable logprobs")
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _FINISH:
            raise EngineError(f"the engine ended the completion with {reason!r}")
        return TokenChunk(ids, logprobs, version, _FINISH[reason] if reason is not None else None)

    def _logprobs(self, told: dict[str, Any]) -> list[Any]:
        return told.get("token_logprobs") or []


class _RoutedReader(_VllmReader):
    """The last event of tokens holds the experts of all tokens that went through the model."""

    def __init__(
        self, url: str, version: Callable[[], int], request: GenerateRequest, experts: int | None
    ) -> None:
        super().__init__(url, version)
        self._prompt_rows = len(request.prompt_ids) - request.routed_from
        self._experts = experts

    def _logprobs(self, told: dict[str, Any]) -> list[Any]:
        return [entry.get("logprob") for entry in told.get("content") or []]

    def _chunk(self, choice: dict[str, Any], version: int) -> TokenChunk:
        chunk, told = super()._chunk(choice, version), choice.get("routed_experts")
        if told is None:
            return chunk
        rows = self._prompt_rows + self._tokens + len(chunk.ids) - 1
        return replace(chunk, routing=routing_from_npy(told, rows, self._experts))


def _prompt_logprobs(answer: dict[str, Any], ids: list[int]) -> list[float]:
    """The logprob of the prompt's own token in each entry, which may list likelier ones."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        found = [float(entry[str(id)]["logprob"]) for entry, id in zip(entries[1:], ids[1:], strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"the engine sent no usable prompt_logprobs: {error!r}") from error
    return [0.0, *found]


def _request_body(request: GenerateRequest, model: str) -> dict[str, Any]:
    wishes = {
        "stop_token_ids": list(request.stop_token_ids) or None,
        "structured_outputs": _structured_outputs(request.constraint),
    }
    return {
        "model": model,
        "prompt": request.prompt_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 1,
        **_OURS,
        "request_id": request.request_id,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        **chat_wire.sampling_fields(request.sampling),
        **{name: value for name, value in wishes.items() if value is not None},
    }


_APART = ("model", "stream", "stream_options", "request_id")
"""Fields of a request that are not sampling parameters."""


def _routed_body(body: dict[str, Any], request: GenerateRequest) -> dict[str, Any]:
    """Convert a completions request to a tokens request with experts."""
    apart = {name: body.pop(name) for name in _APART}
    del body["return_token_ids"]
    return apart | {
        "token_ids": body.pop("prompt"),
        "sampling_params": body | {"routed_experts_prompt_start": request.routed_from},
    }


def _structured_outputs(constraint: Constraint | None) -> dict[str, str] | None:
    if constraint is None:
        return None
    if constraint.json_schema is not None:
        return {"json": constraint.json_schema}
    return {"structural_tag": constraint.structural_tag or ""}
