"""Continuous batching: every step advances all decoding requests by a token and prefills a chunk.

A step is one forward pass over a packed row: the last token of each decoding request, then up
to a chunk of prompt tokens. Prompts are prefilled one after the other, in order of arrival, so
a prompt that begins like the one before it finds those tokens computed and copies them.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from polar.engines.embedded.attention import AttentionSegment
from polar.engines.embedded.grammar import Guide
from polar.engines.embedded.model import NewWeights, SlotModel
from polar.engines.embedded.sampler import Draw, sample
from polar.engines.vocabulary import Detokenizer
from polar.models.chat import FinishReason
from polar.models.completion import Ids
from polar.telemetry.readings import Readings

log = logging.getLogger(__name__)

WORTH_WAITING_FOR = 16
"""A prompt waits a step if a prompt being prefilled will save it at least this many tokens."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """How many prompt tokens a step computes."""

    shared: int
    """While requests decode: each of them waits this long for its next token."""
    alone: int


CPU_CHUNKS = Chunks(shared=128, alone=512)
GPU_CHUNKS = Chunks(shared=2048, alone=4096)


@dataclass(frozen=True, slots=True)
class Generation:
    """What is asked of the scheduler; the prompt and max_tokens fit the context together."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """The model's own end tokens included, unless the caller ignores them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    guide: Guide | None = None
    """Made for this generation alone: it follows the sampled text."""


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

    def goes_with(self, other: Sampled) -> bool:
        """Whether one answer may carry both: it has one version, and a failure stands alone."""
        is_token = self.finish_reason is not FinishReason.ERROR
        return is_token and self.policy_version == other.policy_version


@dataclass(slots=True)
class SchedulerCounts:
    """Since the engine started; written by the thread that computes, read by the one that serves."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in a slot already."""
    sampled_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Running:
    """A request that holds a slot."""

    number: int
    asked: Generation
    prompt: Ids
    placement: Placement
    draw: Draw
    text: Detokenizer
    sampled: list[int] = field(default_factory=list)

    @property
    def slot(self) -> Slot:
        return self.placement.slot

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
        self.counts = SchedulerCounts()
        self.table = SlotTable(model.cache.slots, model.context)
        self._chunks = chunks or (CPU_CHUNKS if model.is_on_cpu else GPU_CHUNKS)
        self._waiting: deque[tuple[int, Generation]] = deque()
        self._running: dict[int, _Running] = {}
        """By slot index."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def readings(self) -> Readings:
        """May be asked from another thread: lengths and numbers, none of which is changed in place."""
        table = self.table
        return Readings(
            requests_running=len(self._running),
            requests_waiting=len(self._waiting),
            kv_usage_ratio=sum(s.length for s in table.slots) / (len(table.slots) * self.model.context),
            prompt_tokens=self.counts.prompt_tokens,
            cached_tokens=self.counts.cached_tokens,
            sampled_tokens=self.counts.sampled_tokens,
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
        """End every request, told as a failure."""
        waiting = [
            Sampled(number, -1, 0.0, "", self.policy_version, 0, FinishReason.ERROR)
            for number, _ in self._waiting
        ]
        self._waiting.clear()
        return waiting + [self._end_with_error(running) for running in list(self._running.values())]

    def use(self, policy: NewWeights) -> None:
        """Sample with these weights from the next token on.

        A request that has sampled keeps what it has computed; one that has not begins anew.
        """
        self.model.use(policy.tensors)
        self.policy_version = policy.version
        self.table.expire()
        for running in self._running.values():
            if not running.is_prefilled:
                running.slot.length, running.slot.is_stale = 0, False
                running.placement = Placement(running.slot, 0)

    def step(self) -> list[Sampled]:
        """Compute one batch and return the tokens sampled in it."""
        try:
            segments = self._batch()
            if not segments:
                # Requests wait for a slot that the scorer holds.
                return []
            wanting, logits = self.model.forward(segments)
            for segment in segments:
                self._running[segment.slot].slot.extend(np.asarray(segment.ids, dtype=np.int32))
            runs = [self._running[segment.slot] for segment in wanting]
            if not runs:
                return []
            ids, logprobs = sample(logits, [running.draw for running in runs])
        except Exception:
            # Out of memory, most likely: the requests of this step are lost, the next ones are not.
            log.exception("a step over %d requests failed", len(self._running))
            return self._fail()
        return [self._advance(*row) for row in zip(runs, ids, logprobs, strict=True)]

    def _batch(self) -> list[AttentionSegment]:
        decoding = [running for running in self._running.values() if running.is_prefilled]
        segments = [AttentionSegment(r.slot.index, r.slot.length, r.sampled[-1:], True) for r in decoding]
        budget = self._chunks.shared if decoding else self._chunks.alone
        for running in self._prefilling():
            start = running.slot.length
            ids = running.asked.prompt_ids[start : start + budget]
            segments.append(AttentionSegment(running.slot.index, start, ids, len(ids) == running.pending))
            budget -= len(ids)
            if budget <= 0:
                break
        return segments

    def _prefilling(self) -> Iterable[_Running]:
        """Requests with prompt tokens to compute, admitting waiting ones as the caller has room."""
        ahead = [running for running in self._running.values() if not running.is_prefilled]
        yield from ahead
        while self._waiting:
            number, asked = self._waiting[0]
            prompt: Ids = np.asarray(asked.prompt_ids, dtype=np.int32)
            if self._will_share_more(prompt, ahead):
                return
            placement = self.table.place(prompt)
            if placement is None:
                return
            self._waiting.popleft()
            running = self._start(number, asked, prompt, placement)
            ahead.append(running)
            yield running

    def _will_share_more(self, prompt: Ids, ahead: list[_Running]) -> bool:
        if not ahead:
            return False
        _, now = self.table.best_prefix(prompt)
        return max(common_prefix(running.prompt, prompt) for running in ahead) - now >= WORTH_WAITING_FOR

    def _start(self, number: int, asked: Generation, prompt: Ids, placement: Placement) -> _Running:
        if placement.source:
            self.model.cache.copy_prefix(placement.source.index, placement.slot.index, placement.reused)
        draw = Draw(
            *(asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.logit_bias, asked.guide),
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
        )
        text = Detokenizer(self.model.text_tokenizer, asked.stop)
        self.counts.prompt_tokens += len(prompt)
        self.counts.cached_tokens += placement.reused
        running = _Running(number, asked, prompt, placement, draw, text)
        self._running[placement.slot.index] = running
        return running

    def _advance(self, running: _Running, token_id: int, logprob: float) -> Sampled:
        if not math.isfinite(logprob):
            log.error("request %d: the model gave a logprob of %s", running.number, logprob)
            running.slot.length = 0
            return self._end_with_error(running)
        running.sampled.append(token_id)
        self.counts.sampled_tokens += 1
        asked = running.asked
        text = running.text.feed(token_id)
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        if token_id in asked.stop_token_ids:
            finish = FinishReason.STOP
            stop_reason = None if token_id in self.model.eos_token_ids else token_id
        elif running.text.matched is not None:
            finish, stop_reason = FinishReason.STOP, running.text.matched
        elif asked.guide is not None and not asked.guide.accept(token_id):
            log.error("request %d: its grammar is beyond what can be computed", running.number)
            return self._end_with_error(running)
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
            cached_tokens=running.placement.reused,
            finish_reason=finish,
            stop_reason=stop_reason,
        )

    def _fail(self) -> list[Sampled]:
        ended = [self._end_with_error(running) for running in list(self._running.values())]
        self.table.forget()
        return ended

    def _end_with_error(self, running: _Running) -> Sampled:
        self._release(running)
        return Sampled(running.number, -1, 0.0, "", self.policy_version, 0, FinishReason.ERROR)

    def _release(self, running: _Running) -> None:
        del self._running[running.slot.index]
        self.table.release(running.slot)


class Slot:
    """One row of the KV buffers and the tokens it holds; they stay after their request has ended."""

    def __init__(self, index: int, context: int) -> None:
        self.index = index
        self.is_free = True
        self.length = 0
        """How many tokens have their keys and values computed."""
        self.is_stale = False
        """Whether some are of weights that have been replaced: good for its own request only."""
        self.last_used = 0
        self._tokens: Ids = np.zeros(context, dtype=np.int32)

    def shared(self, prompt: Ids) -> int:
        """How many computed tokens a prompt begins with."""
        return 0 if self.is_stale else common_prefix(self._tokens[: self.length], prompt)

    def extend(self, ids: Ids) -> None:
        """These tokens are computed now."""
        self._tokens[self.length : self.length + len(ids)] = ids
        self.length += len(ids)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a prompt goes: `reused` tokens of it are in `slot`, after copying them from `source` if set."""

    slot: Slot
    reused: int
    source: Slot | None = None


class SlotTable:
    """All slots. Free ones serve as the prefix cache, the least recently used is overwritten first."""

    def __init__(self, count: int, context: int) -> None:
        self.slots = [Slot(index, context) for index in range(count)]
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

    def place(self, prompt: Ids) -> Placement | None:
        """Take a slot for a prompt, or None while all are busy."""
        free = [slot for slot in self.slots if slot.is_free]
        if not free:
            return None
        best, reused = self.best_prefix(prompt)
        if best.is_free and 2 * reused >= best.length:
            placement = Placement(best, reused)
        else:
            # The best slot is busy, or holds mostly another conversation that may come back.
            oldest = min(free, key=lambda slot: (slot.length > 0, slot.last_used))
            placement = Placement(oldest, reused, None if oldest is best or not reused else best)
        placement.slot.is_free = False
        self._touch(placement.slot)
        if placement.source:
            placement.slot.length = 0
            placement.slot.extend(prompt[:reused])
        placement.slot.length = reused
        return placement

    def release(self, slot: Slot) -> None:
        slot.is_free = True
        if slot.is_stale:
            slot.is_stale, slot.length = False, 0
        self._touch(slot)

    def forget(self) -> None:
        """Drop every cached token, while no slot is taken: they are no longer what the model computes."""
        for slot in self.slots:
            slot.length = 0

    def expire(self) -> None:
        """Forget what is cached of the old weights once they have been replaced."""
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
