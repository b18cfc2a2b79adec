"""Sessions as the gateway sees them: grants, what they have used, their open calls; found by their keys."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import AnyStr, TypeVar

from polar.config.settings import GatewaySettings
from polar.dialects.base import Refusal, RequestRefused
from polar.errors import Conflict, NotFound
from polar.gateway.conversation import Conversations, Extension
from polar.gateway.playback import Playback, ReplayEnded
from polar.gateway.quota import GatewayMemory, SessionQuota
from polar.gateway.request_coalescer import RequestCoalescer
from polar.models.chat import ChatRequest, FinishReason, Message, Usage
from polar.models.completion import LEFT, REPLAYED, Completion
from polar.models.session import AgentEnd, Progress
from polar.models.task import Budgets, SamplingPin
from polar.recordings.capture import CaptureWriter


@dataclass(frozen=True)
class SessionGrant:
    """The right of whoever holds `key` to call the model for one session."""

    session_id: str
    key: str
    capture: Path
    """Where the session's completions are logged; made if absent."""
    sampling: SamplingPin
    budgets: Budgets
    sample: int = 0
    traceparent: str | None = None
    """The span that its completions' spans go below, as W3C's header names it; None: there is none."""
    serves_any_name: bool = False
    """Whether the model answers to any name: a program that is wrapped as it is may have one built in."""
    deadline_seconds: float | None = None
    """Wall time from opening to the end of all calls; None where whoever opens it also ends it in time."""
    harness_version: str | None = None
    """Which version of its harness asks, where that is known."""
    playback: Playback | None = None
    """The recording that answers its first calls; None: the model answers them all."""
    grown: Callable[[Completion, int], None] | None = None
    """Told of every completion that was recorded, and how long the capture is with it."""


Watch = Callable[[SessionGrant, Completion], None]
"""Told of every completion that was recorded, for metrics and traces."""


K = TypeVar("K")
V = TypeVar("V")

_REMEMBERED = 1_000
"""How many ended sessions are remembered, to answer 410 instead of 401 and to report progress."""
_LONGEST_AVERAGE_TOKEN = 16
"""Characters a token; ordinary text has three to five."""
_KEY = r"polar-[A-Za-z0-9_-]{43}"
_BLOT = "[session key]"


def new_key() -> str:
    """A secret that opens one session's model calls."""
    return "polar-" + secrets.token_urlsafe(32)


def without_keys(written: AnyStr) -> AnyStr:
    """What an agent wrote, with every key in it blotted out.

    It may have printed its environment. The key opens nothing once the session is over, and is kept nowhere
    even so.
    """
    if isinstance(written, bytes):
        return re.sub(_KEY.encode(), _BLOT.encode(), written)
    return re.sub(_KEY, _BLOT, written)


class WallClock:
    """Runs from the session's opening until its time is spent or the clock is stopped; a pause is no time."""

    def __init__(self, seconds: float | None, when_spent: Callable[[], None], *, is_paused: bool) -> None:
        """`seconds` None: time without end."""
        self.seconds = seconds
        self.is_spent = False
        self._when_spent = when_spent
        self._left = seconds
        self._timer: asyncio.TimerHandle | None = None
        if not is_paused:
            self.resume()

    @property
    def left(self) -> float | None:
        """Seconds; None: without end, or no longer counted."""
        if self._timer is None:
            return self._left
        return max(self._timer.when() - asyncio.get_running_loop().time(), 0.0)

    def skip_to(self, left: float) -> None:
        """Leave no more seconds than that."""
        if (now := self.left) is not None:
            self._leave(min(now, left))

    def restart(self) -> None:
        """Leave all of its seconds."""
        if self.left is not None:
            self._leave(self.seconds)

    def _leave(self, seconds: float | None) -> None:
        is_running = self._timer is not None
        self.pause()
        self._left = seconds
        if is_running:
            self.resume()

    def pause(self) -> None:
        if self._timer is not None:
            self._left = self.left
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        if self._timer is None and self._left is not None:
            self._timer = asyncio.get_running_loop().call_later(self._left, self._spend)

    def stop(self) -> None:
        self.pause()
        self._left = None
        # Whoever is told of the end holds the clock: together they would wait for the garbage collector.
        self._when_spent = lambda: None

    def _spend(self) -> None:
        self._left = self._timer = None
        self.is_spent = True
        self._when_spent()


class Session:
    """The running account of a grant."""

    def __init__(
        self,
        grant: SessionGrant,
        settings: GatewaySettings,
        memory: GatewayMemory,
        watch: Watch,
        *,
        is_paused: bool,
    ) -> None:
        self.grant = grant
        self.quota = SessionQuota(settings, memory)
        self.coalescer = RequestCoalescer(settings.retry_seconds)
        self._watch = watch
        self.conversations = Conversations()
        self.calls: set[asyncio.Task[object]] = set()
        self.budget_spent = asyncio.Event()
        self.spent_reason = ""
        """Which budget was used up first, once one is."""
        self._is_replayed = False
        self.ended = False
        self.has_lost_call = False
        self.sampled_tokens = 0
        self._completions = 0
        self._replayed_tokens = 0
        """Tokens among these that another session sampled."""
        self._free = Progress()
        """What of all that the budgets do not count."""
        self.recorded = 0
        """How many completions its capture holds."""
        self._begun = 0
        self._contexts: dict[str, int] = {}
        """Completion id → how many tokens its prompt and answer have."""
        self._capture = CaptureWriter(grant.capture)
        self.clock = WallClock(grant.deadline_seconds, self._end_in_time, is_paused=is_paused)
        """Stands still while the policy is paused."""

    @property
    def progress(self) -> Progress:
        return Progress(
            completions=self._completions,
            sampled_tokens=self.sampled_tokens,
            replayed_tokens=self._replayed_tokens,
        )

    @property
    def agent_end(self) -> AgentEnd:
        """How its agent ends, once it is to end before it does so by itself."""
        if self._is_replayed:
            return AgentEnd.REPLAYED
        return AgentEnd.TIMEOUT if self.clock.is_spent else AgentEnd.BUDGET

    def begin_calls(self, count: int) -> range:
        """Admit `count` calls at once; returns their places in the order of beginning, from 0."""
        self.refuse_when_over()
        budgets = self.grant.budgets
        open_calls = len(self.calls)
        self.quota.refuse_calls(count, in_flight=open_calls)
        used = self._completions - self._free.completions + open_calls
        if budgets.max_completions is not None and used + count > budgets.max_completions:
            raise self._spent(f"all {budgets.max_completions} model calls are used")
        if self.tokens_left == 0:
            raise self._spent(f"all {budgets.max_sampled_tokens} sampled tokens are used")
        self._begun += count
        return range(self._begun - count, self._begun)

    def find(self, request: ChatRequest, model_context: int) -> Extension:
        """What the request continues; RequestRefused without rendering it if it is too long by far."""
        if isinstance(request.raw, tuple):
            self.room(len(request.raw), model_context)
        longest = model_context * _LONGEST_AVERAGE_TOKEN
        said = sum(message.length for message in request.messages)
        if said + self.conversations.tools_length(request.tools) > longest:
            raise context_overflow(model_context)
        return self.conversations.find(request.messages, request.tools)

    def room(self, prompt_tokens: int, model_context: int | None = None) -> int | None:
        """How many tokens may be sampled after a prompt, None: any number; RequestRefused if none may."""
        self.refuse_when_over()
        self.refuse_long_prompt(prompt_tokens)
        if model_context is not None and prompt_tokens >= model_context:
            raise context_overflow(model_context, prompt_tokens)
        contexts = (self.grant.budgets.max_context_tokens, model_context)
        limits = [context - prompt_tokens for context in contexts if context is not None]
        if self.tokens_left is not None:
            limits.append(max(self.tokens_left, 1))
        return min(limits, default=None)

    def context_of(self, completion_id: str) -> int:
        """How many tokens the prompt and the answer of a completion have; 0 if it is not known."""
        return self._contexts.get(completion_id, 0)

    def refuse_long_prompt(self, prompt_tokens: int) -> None:
        """RequestRefused if the budget leaves nothing to be sampled after so long a prompt."""
        if self.is_full(prompt_tokens):
            budget = self.grant.budgets.max_context_tokens
            raise self._spent(f"the conversation has {prompt_tokens} of {budget} context tokens")

    def is_full(self, context_tokens: int) -> bool:
        budget = self.grant.budgets.max_context_tokens
        return budget is not None and context_tokens >= budget

    @property
    def tokens_left(self) -> int | None:
        limit = self.grant.budgets.max_sampled_tokens
        return None if limit is None else max(limit + self._free.sampled_tokens - self.sampled_tokens, 0)

    def count_given(self, completion: Completion) -> None:
        """Count a recorded answer, and the time that it took when it was sampled, or nothing of it."""
        playback, free = self.grant.playback, self._free
        self.sampled_tokens += completion.sampled_tokens
        if REPLAYED in completion.extra:
            self._replayed_tokens += completion.sampled_tokens
        if playback is not None and playback.is_free(completion):
            tokens = free.sampled_tokens + completion.sampled_tokens
            self._free = Progress(completions=free.completions + 1, sampled_tokens=tokens)
            self.clock.restart()
        elif LEFT in completion.extra:
            self.clock.skip_to(float(completion.extra[LEFT]))

    def end_replay(self, ended: ReplayEnded) -> RequestRefused:
        """What a call is told after which the agent is to go no further."""
        self._is_replayed = self._is_replayed or not self.budget_spent.is_set()
        self._spend(ended.message)
        return RequestRefused(Refusal.SESSION_ENDED, f"The replay has ended: {ended.message}.")

    def record(
        self, completion: Completion, usage: Usage, *, is_whole: bool, said: Sequence[Message] = ()
    ) -> None:
        """Commit a completion; one that is whole is found by requests that continue it.

        `said` is what the client sent for its last messages, where recorded ones may stand for them.
        """
        turn = self._capture.append(completion)
        self.quota.capture_bytes = self._capture.length
        if self.grant.grown is not None:
            self.grant.grown(completion, self._capture.length)
        self.recorded += 1
        self._watch(self.grant, completion)
        self._contexts[completion.id] = usage.prompt_tokens + usage.sampled_tokens
        if completion.finish_reason is not FinishReason.ERROR or usage.sampled_tokens:
            self._completions += 1
        if is_whole:
            self.conversations.add(turn, completion.tools)
            self.conversations.alias(turn, completion.tools, said)
        self._end_when_wasted()

    def count_failure(self, error: RequestRefused) -> None:
        """Count a request that was refused; too many of them end the session's agent."""
        self.quota.count_failure(error)
        self._end_when_wasted()

    async def close(self) -> None:
        """Abort open calls, which record themselves as cancelled, add what earlier attempts at the session
        sampled for nothing, and close the log."""
        self.ended = True
        self.clock.stop()
        self._end_calls()
        if self.calls:
            await asyncio.wait(self.calls)
        # Calls hold their session: together they would wait for the garbage collector.
        self.coalescer.forget()
        try:
            playback = self.grant.playback
            for completion in playback.superseded(self._contexts) if playback is not None else ():
                self._capture.append(replace(completion, index=self.recorded))
                self.recorded += 1
        finally:
            self._capture.close()

    def why_over(self) -> RequestRefused:
        """What calls of a session that has ended, or is ending, are told."""
        return self.over() or session_ended()

    def over(self) -> RequestRefused | None:
        """Why no further call is answered, if that is so."""
        if self.ended:
            return session_ended()
        if self.clock.is_spent:
            return self._spent(self._time_over)
        return self._spent(self.quota.spent) if self.quota.spent else None

    def refuse_when_over(self) -> None:
        if error := self.over():
            raise error

    def _end_when_wasted(self) -> None:
        if self.quota.spent:
            self._spend(self.quota.spent)

    def _end_in_time(self) -> None:
        self._spend(self._time_over)
        self._end_calls()

    def _end_calls(self) -> None:
        for call in self.calls:
            call.cancel()

    @property
    def _time_over(self) -> str:
        return f"its {self.clock.seconds:g} seconds are over"

    def _spend(self, what: str) -> None:
        self.spent_reason = self.spent_reason or what
        self.budget_spent.set()

    def _spent(self, what: str) -> RequestRefused:
        self._spend(what)
        return RequestRefused(Refusal.BUDGET_SPENT, f"The session is out of budget: {what}.")


class SessionRegistry:
    """Those a gateway serves, each opened by its own key; those that ended are remembered for a while."""

    def __init__(self, settings: GatewaySettings, watch: Watch) -> None:
        self._settings = settings
        self._memory = GatewayMemory(settings)
        self._watch = watch
        self._by_key: dict[bytes, Session] = {}
        self._open: dict[str, Session] = {}
        self._ended_keys: OrderedDict[bytes, None] = OrderedDict()
        self._ended: OrderedDict[str, Progress] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        """Those that are open now."""
        return iter(tuple(self._open.values()))

    def open(self, grant: SessionGrant, *, is_paused: bool) -> None:
        if grant.session_id in self._open:
            raise Conflict(f"session {grant.session_id} is open already")
        session = Session(grant, self._settings, self._memory, self._watch, is_paused=is_paused)
        self._open[grant.session_id] = session
        self._by_key[_digest(grant.key)] = session

    def __len__(self) -> int:
        return len(self._open)

    def get(self, session_id: str) -> Session:
        session = self._open.get(session_id)
        if session is None:
            raise NotFound(f"session {session_id} is not open")
        return session

    def progress(self, session_id: str) -> Progress:
        """What the session has done so far; nothing for one that was never opened."""
        session = self._open.get(session_id)
        return session.progress if session else self._ended.get(session_id, Progress())

    def of_key(self, key: str | None) -> Session:
        """The open session that a client's key belongs to; RequestRefused if there is none."""
        if key is not None:
            digest = _digest(key)
            session = self._by_key.get(digest)
            if session is not None and not session.ended:
                return session
            if session is not None or digest in self._ended_keys:
                raise session_ended()
        what = "No API key was given." if key is None else "Incorrect API key provided."
        raise RequestRefused(Refusal.UNKNOWN_KEY, f"{what} Use the key of a running Polar session.")

    async def close(self, session_id: str) -> None:
        """Abort what is in flight; later calls are told that the session has ended."""
        session = self._open.get(session_id)
        if session is None:
            return
        try:
            await session.close()
        finally:
            self._open.pop(session_id, None)
            digest = _digest(session.grant.key)
            self._by_key.pop(digest, None)
            _remember(self._ended_keys, digest, None)
            _remember(self._ended, session_id, session.progress)


def _digest(key: str) -> bytes:
    """What a key is looked up by: how long that takes tells nothing of any key."""
    # A header may hold any bytes; those that are no text come as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)


def session_ended() -> RequestRefused:
    return RequestRefused(Refusal.SESSION_ENDED, "This session has ended; its key is no longer valid.")


def context_overflow(model_context: int, prompt_tokens: int | None = None) -> RequestRefused:
    detail = f" However, your messages resulted in {prompt_tokens} tokens." if prompt_tokens else ""
    return RequestRefused(
        Refusal.CONTEXT_OVERFLOW,
        f"This model's maximum context length is {model_context} tokens.{detail} "
        "Please reduce the length of the messages.",
        field="messages",
        tokens=prompt_tokens,
        limit=model_context,
    )
