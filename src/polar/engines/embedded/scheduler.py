"""Continuous batching: every step advances all decoding requests by a token and prefills a chunk.

A step is one forward pass over a packed row: the last token of each decoding request, then up
to a chunk of prompt tokens. Prompts are prefilled one after the other, in order of arrival, so
a prompt that begins like the one before it finds those tokens computed and copies them. A prompt
that is to be scored is computed from its first token on, whatever is cached of it, since each
position's logits are needed.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from polar.engines.embedded.attention import AttentionSegment, SlotCache
from polar.engines.embedded.model import NewWeights, SlotModel
from polar.engines.embedded.sampler import Draw, sample, score
from polar.engines.vocabulary import Detokenizer
from polar.models.chat import FinishReason
from polar.models.completion import Ids
from polar.telemetry.readings import Readings

log = logging.getLogger(__name__)

WORTH_WAITING_FOR = 16
"""A prompt waits a step if a prompt being prefilled will save it at least this many tokens."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompt tokens computed per step."""

    shared: int
    """While requests decode: each of them waits this long for its next token."""
    alone: int


CPU_CHUNKS = Chunks(shared=128, alone=512)
GPU_CHUNKS = Chunks(shared=2048, alone=4096)


SCORED_BYTES = 64 * 2**20
"""Memory limit for prompt logits in a step, in single precision."""
SCORED_MIN, SCORED_MAX = 16, 512
"""Tokens of a prompt that are scored in a step, whatever the size of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation request; prompt and max_tokens must fit the context together."""

    prompt_ids: list[int]
    max_tokens: int
    draw: Draw = field(default_factory=Draw)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """The model's own end tokens included, unless the caller ignores them."""
    scores_prompt: bool = False
    """Whether the first token is to come with the logprobs of the prompt's own."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token of one request."""

    request: int
    token_id: int
    logprob: float
    text: str
    """Text that became certain, not necessarily of this token alone."""
    policy_version: int
    cached_tokens: int
    finish_reason: FinishReason | None = None
    """Set on the last token; ERROR carries no token."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the request."""
    prompt_logprobs: list[float] | None = None
    """Set on the first token, if requested: logprobs of all prompt tokens but the first."""

    def goes_with(self, other: Sampled) -> bool:
        """Whether one answer may carry both: it has one version, and a failure stands alone."""
        is_token = self.finish_reason is not FinishReason.ERROR
        return is_token and self.policy_version == other.policy_version


@dataclass(slots=True, eq=False)
class _Running:
    """A request that holds a slot."""

    number: int
    asked: Generation
    prompt: Ids
    slot: Slot
    reused: int
    """Prompt tokens that were computed before it came."""
    draw: Draw
    text: Detokenizer
    sampled: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        return bool(self.sampled)

    @property
    def pending(self) -> int:
        """Prompt tokens not yet computed."""
        return len(self.prompt) - self.slot.length


class Scheduler:
    """Owns the slots of a model. Not thread-safe: one thread submits, aborts and steps."""

    def __init__(self, model: SlotModel, chunks: Chunks | None = None) -> None:
        self.model = model
        self.policy_version = 0
        self.table = SlotTable(model.cache)
        self._chunks = chunks or (CPU_CHUNKS if model.is_on_cpu else GPU_CHUNKS)
        self._waiting: deque[tuple[int, Generation]] = deque()
        self._running: dict[int, _Running] = {}
        """Running requests by slot index."""
        fitting = SCORED_BYTES // (4 * model.vocabulary)
        self._scored_at_once = max(SCORED_MIN, min(SCORED_MAX, fitting))
        self._prompt_tokens = self._cached_tokens = self._sampled_tokens = 0
        """Prompt tokens since start; the cached ones were in a slot already."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def readings(self) -> Readings:
        """Return the load. Safe in another thread: it reads only lengths and numbers, never changed in
        place."""
        table = self.table
        return Readings(
            requests_running=len(self._running),
            requests_waiting=len(self._waiting),
            kv_usage_ratio=sum(s.length for s in table.slots) / (len(table.slots) * self.model.context),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            sampled_tokens=self._sampled_tokens,
        )

    def submit(self, number: int, asked: Generation) -> None:
        """Queue a request under a number that the caller chose."""
        self._waiting.append((number, asked))

    def abort(self, number: int) -> None:
        """Forget a request; its slot is free at once. Unknown numbers are requests that have ended."""
        self._waiting = deque(item for item in self._waiting if item[0] != number)
        for running in list(self._running.values()):
            if running.number == number:
                self._release(running)

    def abort_all(self) -> list[Sampled]:
        """End every request with an error."""
        numbers = [number for number, _ in self._waiting]
        self._waiting.clear()
        return [*map(self._failure, numbers), *self._fail_running()]

    def use(self, policy: NewWeights) -> None:
        """Sample with these weights from the next token on.

        A request that has sampled keeps what it has computed; one that has not begins anew.
        """
        self.model.use(policy.tensors)
        self.policy_version = policy.version
        self.table.expire()
        for running in self._running.values():
            if not running.is_prefilled:
                running.slot.length, running.slot.is_stale, running.reused = 0, False, 0
                running.prompt_logprobs.clear()

    def step(self) -> list[Sampled]:
        """Compute one batch and return the tokens sampled in it."""
        try:
            segments = self._batch()
            wanting, logits = self.model.forward(segments)
            for segment in segments:
                self._running[segment.slot].slot.extend(np.asarray(segment.ids, dtype=np.int32))
            runs, rows = self._read(wanting, logits)
            if not runs:
                return []
            ids, logprobs = sample(rows, [running.draw for running in runs])
        except Exception:
            # Out of memory, most likely: the requests of this step are lost, the next ones are not.
            log.exception("a step over %d requests failed", len(self._running))
            failures = self._fail_running()
            self.table.forget()
            return failures
        return [self._advance(*row) for row in zip(runs, ids, logprobs, strict=True)]

    def _batch(self) -> list[AttentionSegment]:
        decoding = [running for running in self._running.values() if running.is_prefilled]
        segments = [AttentionSegment(r.slot.index, r.slot.length, r.sampled[-1:], 1) for r in decoding]
        budget = self._chunks.shared if decoding else self._chunks.alone
        for running in self._prefilling():
            start, is_scored = running.slot.length, running.asked.scores_prompt
            end = start + (min(budget, self._scored_at_once) if is_scored else budget)
            ids = running.asked.prompt_ids[start:end]
            wanted = len(ids) if is_scored else int(len(ids) == running.pending)
            segments.append(AttentionSegment(running.slot.index, start, ids, wanted))
            budget -= len(ids)
            if budget <= 0:
                break
        return segments

    def _read(
        self, wanting: list[AttentionSegment], logits: torch.Tensor
    ) -> tuple[list[_Running], torch.Tensor]:
        """Score prompts, and return the requests to sample for with one row of logits each."""
        runs, lasts, at = [], [], 0
        for segment in wanting:
            running = self._running[segment.slot]
            if running.asked.scores_prompt and not running.is_prefilled:
                following = running.asked.prompt_ids[segment.start + 1 : segment.end + 1]
                running.prompt_logprobs += score(logits[at : at + len(following)], following)
            at += segment.logits
            if running.pending <= 0:
                runs.append(running)
                lasts.append(at - 1)
        return runs, logits if len(lasts) == len(logits) else logits[lasts]

    def _prefilling(self) -> Iterable[_Running]:
        """Requests with prompt tokens to compute, admitting waiting ones as the caller has room."""
        ahead = [running for running in self._running.values() if not running.is_prefilled]
        yield from ahead
        while self._waiting:
            number, asked = self._waiting[0]
            prompt: Ids = np.asarray(asked.prompt_ids, dtype=np.int32)
            if self._will_share_more(prompt, ahead):
                return
            placed = self.table.place(prompt, reuses=not asked.scores_prompt)
            if placed is None:
                return
            self._waiting.popleft()
            text = Detokenizer(self.model.text_tokenizer, asked.stop)
            running = _Running(number, asked, prompt, *placed, replace(asked.draw), text)
            self._running[running.slot.index] = running
            self._prompt_tokens += len(prompt)
            self._cached_tokens += running.reused
            ahead.append(running)
            yield running

    def _will_share_more(self, prompt: Ids, ahead: list[_Running]) -> bool:
        if not ahead:
            return False
        _, now = self.table.best_prefix(prompt)
        return max(common_prefix(running.prompt, prompt) for running in ahead) - now >= WORTH_WAITING_FOR

    def _advance(self, running: _Running, token_id: int, logprob: float) -> Sampled:
        if not math.isfinite(logprob):
            log.error("request %d: the model gave a logprob of %s", running.number, logprob)
            running.slot.length = 0
            return self._fail(running)
        is_first = not running.sampled
        running.sampled.append(token_id)
        self._sampled_tokens += 1
        asked = running.asked
        text = running.text.feed(token_id)
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        if token_id in asked.stop_token_ids:
            finish = FinishReason.STOP
            stop_reason = None if token_id in self.model.eos_token_ids else token_id
        elif running.text.matched is not None:
            finish, stop_reason = FinishReason.STOP, running.text.matched
        elif running.draw.guide is not None and not running.draw.guide.accept(token_id):
            log.error("request %d: its grammar is beyond what can be computed", running.number)
            return self._fail(running)
        elif len(running.sampled) >= asked.max_tokens:
            finish = FinishReason.LENGTH
        if finish:
            text += running.text.finish()
            self._release(running)
        return Sampled(
            request=running.number,
            token_id=token_id,
            logprob=logprob,
            text=text,
            policy_version=self.policy_version,
            cached_tokens=running.reused,
            finish_reason=finish,
            stop_reason=stop_reason,
            prompt_logprobs=running.prompt_logprobs if asked.scores_prompt and is_first else None,
        )

    def _failure(self, number: int) -> Sampled:
        return Sampled(number, -1, 0.0, "", self.policy_version, 0, FinishReason.ERROR)

    def _fail(self, running: _Running) -> Sampled:
        self._release(running)
        return self._failure(running.number)

    def _fail_running(self) -> list[Sampled]:
        return [self._fail(running) for running in list(self._running.values())]

    def _release(self, running: _Running) -> None:
        del self._running[running.slot.index]
        self.table.release(running.slot)


class Slot:
    """One row of the KV buffers and the tokens it holds; they stay after their request has ended."""

    def __init__(self, index: int, context: int) -> None:
        self.index = index
        self.is_free = True
        self.length = 0
        """Number of tokens with computed keys and values."""
        self.is_stale = False
        """Whether some were computed with replaced weights: usable for its own request only."""
        self.last_used = 0
        self._tokens: Ids = np.zeros(context, dtype=np.int32)

    def shared(self, prompt: Ids) -> int:
        """Length of the prefix that a prompt shares with the computed tokens."""
        return 0 if self.is_stale else common_prefix(self._tokens[: self.length], prompt)

    def extend(self, ids: Ids) -> None:
        """These tokens are computed now."""
        self._tokens[self.length : self.length + len(ids)] = ids
        self.length += len(ids)


class SlotTable:
    """All slots. Free ones serve as the prefix cache, the least recently used is overwritten first."""

    def __init__(self, cache: SlotCache) -> None:
        self.slots = [Slot(index, cache.context) for index in range(cache.slots)]
        self._cache = cache
        self._clock = 0

    @property
    def free(self) -> int:
        return sum(slot.is_free for slot in self.slots)

    def best_prefix(self, prompt: Ids) -> tuple[Slot, int]:
        """The slot that shares the most with a prompt, free ones first among equals."""
        # The last token is computed in any case: the first sampled token needs its logits.
        shares = [(min(slot.shared(prompt), len(prompt) - 1), slot.is_free, slot) for slot in self.slots]
        length, _, slot = max(shares, key=lambda share: share[:2])
        return slot, length

    def place(self, prompt: Ids, *, reuses: bool) -> tuple[Slot, int] | None:
        """Take a slot; return it with its number of reusable prompt tokens. None if all are busy."""
        free = [slot for slot in self.slots if slot.is_free]
        if not free:
            return None
        best, reused = self.best_prefix(prompt)
        if not reuses:
            reused = 0
        slot = best
        if not best.is_free or 2 * reused < best.length:
            # The best slot is busy, or holds mostly another conversation that may come back.
            slot = min(free, key=lambda slot: (slot.length > 0, slot.last_used))
        if slot is not best and reused:
            self._cache.copy_prefix(best.index, slot.index, reused)
            slot.length = 0
            slot.extend(prompt[:reused])
        slot.length = reused
        slot.is_free = False
        self._touch(slot)
        return slot, reused

    def release(self, slot: Slot) -> None:
        slot.is_free = True
        if slot.is_stale:
            slot.is_stale, slot.length = False, 0
        self._touch(slot)

    def forget(self) -> None:
        """Drop every cached token; no slot may be taken."""
        for slot in self.slots:
            slot.length = 0

    def expire(self) -> None:
        """Drop tokens cached with the old weights."""
        for slot in self.slots:
            if slot.is_free:
                slot.length = 0
            else:
                slot.is_stale = True

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def common_prefix(left: Ids, right: Ids) -> int:
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if differing.size else length
