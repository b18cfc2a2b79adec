"""An engine that plays given answers, token by token, with logprobs that follow from the ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from polar.engines.base import Engine, EngineError, GenerateRequest, ModelInfo, TokenChunk, WeightUpdate
from polar.models.chat import FinishReason
from polar.models.completion import Routing
from polar.models.policy import PauseMode
from tests.fakes.routing import routing_of

END = "<|im_end|>"


@dataclass(frozen=True)
class Answer:
    """One answer, with what may happen while it is given."""

    text: str
    ends: bool = True
    """Whether the end-of-turn token follows the text; without it the answer is cut off by length."""
    gate: asyncio.Event | None = None
    """Waited for before token `gate_at` is given."""
    gate_at: int = 0
    failure: Exception | None = None
    """Raised instead of token `fail_at`."""
    fail_at: int = 0
    chunk: int = 1
    """Tokens a chunk."""
    doubt: float = 0.0
    """By how much the logprob of each token is below that of `logprob_of`."""


Script = str | Answer | Exception | Callable[[GenerateRequest], "str | Answer"]


def logprob_of(id: int) -> float:
    """The logprob this engine gives a token: exact in float32, different for neighbours."""
    return -((id % 64) + 1) / 64


class ScriptedEngine(Engine):
    """Answers the n-th request with the n-th entry of its script; the last entry repeats if asked to.

    `tokenizer` recognises control tokens in the script's texts, so `<|im_end|>` can be written.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Sequence[Script],
        *,
        repeat_last: bool = False,
        name: str = "scripted",
        max_context: int = 8192,
        policy_version: int = 0,
        records_routing: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.script = list(script)
        self.repeat_last = repeat_last
        self.info = ModelInfo(name, max_context, policy_version, records_routing=records_routing)
        self.policy_version = policy_version
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        """Ids of requests whose iterator was closed before the end."""
        self.waiting = asyncio.Event()
        """Set whenever an answer has come to its gate."""
        self.abort = asyncio.Event()
        """Set whenever a request was aborted."""
        self.closed = False
        self.pauses: list[PauseMode] = []
        self.updates: list[WeightUpdate] = []
        self.update_failure: str | None = None
        """Why it cannot take other weights."""
        self._flows = asyncio.Event()
        self._flows.set()

    def encode(self, text: str, *, ends: bool = True) -> list[int]:
        """The ids an answer consists of."""
        ids: list[int] = self.tokenizer.encode(text + (END if ends else ""), add_special_tokens=False).ids
        return ids

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        request = replace(request, prompt_ids=list(map(int, request.prompt_ids)))
        answer = self._next(request)
        self.requests.append(request)
        limit = request.sampling.max_tokens
        ids = self.encode(answer.text, ends=answer.ends)
        cut = not answer.ends or (limit is not None and len(ids) > limit)
        ids = ids[:limit]
        finished = False
        try:
            for start in range(0, len(ids), answer.chunk):
                piece = ids[start : start + answer.chunk]
                await self._stage(answer, start)
                await self._flows.wait()
                last = start + len(piece) == len(ids)
                finished = last
                yield TokenChunk(
                    ids=piece,
                    logprobs=[logprob_of(id) - answer.doubt for id in piece],
                    policy_version=self.policy_version,
                    finish_reason=(FinishReason.LENGTH if cut else FinishReason.STOP) if last else None,
                    routing=self._routing(request, ids) if last else None,
                )
        except (GeneratorExit, asyncio.CancelledError):
            if not finished:
                self.aborted.append(request.request_id)
                self.abort.set()
            raise

    def _routing(self, request: GenerateRequest, sampled: list[int]) -> Routing | None:
        context = [*request.prompt_ids, *sampled]
        return routing_of(context, request.routed_from) if self.info.records_routing else None

    async def model_info(self) -> ModelInfo:
        return replace(self.info, policy_version=self.policy_version)

    async def pause(self, mode: PauseMode) -> None:
        self.pauses.append(mode)
        self._flows.clear()

    async def resume(self) -> None:
        self._flows.set()

    async def update_weights(self, update: WeightUpdate) -> None:
        if self.update_failure is not None:
            raise EngineError(self.update_failure)
        self.updates.append(update)
        self.policy_version = update.version

    async def close(self) -> None:
        self.closed = True

    def _next(self, request: GenerateRequest) -> Answer:
        position = len(self.requests)
        if position >= len(self.script) and not self.repeat_last:
            raise AssertionError(f"the script has {len(self.script)} answers, request {position + 1} came")
        entry = self.script[min(position, len(self.script) - 1)]
        if isinstance(entry, Exception):
            self.requests.append(request)
            raise entry
        if not isinstance(entry, str | Answer):
            entry = entry(request)
        return Answer(entry) if isinstance(entry, str) else entry

    async def _stage(self, answer: Answer, position: int) -> None:
        if answer.failure is not None and position <= answer.fail_at < position + answer.chunk:
            raise answer.failure
        if answer.gate is not None and position <= answer.gate_at < position + answer.chunk:
            self.waiting.set()
            await answer.gate.wait()
