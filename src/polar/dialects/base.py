"""One provider's wire format as pure functions: request → chat request, completion → response, errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import ClassVar

from polar.errors import PolarError
from polar.models.chat import ChatRequest, FinishReason, Message, TokenLogprob, ToolCall, Usage

_LONGEST_HINT = 200

Recall = Callable[[str], tuple[Message, ...] | None]
"""The whole conversation of a completion of the same session by its id, its answer last; None: unknown."""


def nothing_recalled(_completion: str) -> None:
    return None


class RouteAction(Enum):
    """What a route asks of the gateway."""

    COMPLETE = auto()
    COUNT_TOKENS = auto()
    """How long would the prompt be? Answered truly, never recorded."""
    LIST_MODELS = auto()
    SHOW_MODEL = auto()
    """One model, which the path names, or the body."""
    FIXED = auto()
    """The route's own `fixed` answer, whoever asks."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """One address a dialect answers at; several dialects may share one (see `Dialect.claims`)."""

    method: str
    path: str
    """May hold `{name}` parameters; they reach `parse` as `HttpRequest.parameters`."""
    action: RouteAction
    fixed: HttpAnswer | None = None
    is_stream: bool | None = None
    """Whether answers are streamed there; None: the body says."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A client's request as a dialect reads it."""

    route: Route
    body: bytes
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of the path."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    recall: Recall = nothing_recalled
    """For requests that name what was said before instead of repeating it."""

    @property
    def model(self) -> str | None:
        """The model that the address names; None: the body does."""
        return self.parameters.get("model")


class Refusal(StrEnum):
    """Why a request gets no completion; each dialect says it in its provider's words."""

    UNKNOWN_KEY = "unknown_key"
    SESSION_ENDED = "session_ended"
    UNKNOWN_ROUTE = "unknown_route"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_RESPONSE = "unknown_response"
    """The request continues a response that this session does not know."""
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    CONTEXT_OVERFLOW = "context_overflow"
    BUDGET_SPENT = "budget_spent"
    OVER_QUOTA = "over_quota"
    """Too much of the session is in flight; the same request is served once some of it has ended."""
    ENGINE_FAILED = "engine_failed"
    ENGINE_DOWN = "engine_down"
    INTERNAL = "internal"


class RequestRefused(PolarError):
    """A request that is answered with an error; `field` names the part of the body at fault.

    On CONTEXT_OVERFLOW `limit` is how many tokens the context holds and `tokens` how many the prompt
    has, where known: harnesses read them from the provider's own sentence.
    """

    def __init__(
        self,
        refusal: Refusal,
        message: str,
        *,
        field: str | None = None,
        tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.field = field
        self.tokens = tokens
        self.limit = limit


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """What a provider prints on every answer."""

    id: str
    model: str
    created: int
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished completion on its way to the client."""

    message: Message
    finish_reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    """Which of the request's stop sequences ended it, if one did."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """The logprob of every sampled token, where the request asks for them."""


def usage_of_all(usages: Sequence[Usage]) -> Usage:
    """What several answers to one prompt cost together; the prompt is counted once."""
    return Usage(
        usages[0].prompt_tokens,
        sum(usage.sampled_tokens for usage in usages),
        max(usage.cached_tokens for usage in usages),
        sum(usage.reasoning_tokens for usage in usages),
        max(usage.waited_seconds for usage in usages),
        max(usage.sampling_seconds for usage in usages),
    )


class StreamEncoder(ABC):
    """Writes one streamed answer. Every method returns the bytes to send now, possibly none."""

    content_type: ClassVar[str] = "text/event-stream"

    def start(self) -> bytes:
        """Sent with the headers, before the engine has said anything."""
        return b""

    @abstractmethod
    def text(self, text: str) -> bytes: ...

    @abstractmethod
    def reasoning(self, text: str) -> bytes: ...

    @abstractmethod
    def tool_call(self, call: ToolCall) -> bytes: ...

    def logprobs(self, sampled: tuple[TokenLogprob, ...]) -> bytes:
        """The logprobs of the tokens since the last call; only where the request asks for them."""
        return b""

    @abstractmethod
    def finish(
        self, finish_reason: FinishReason, usage: Usage, stop_sequence: str | None = None
    ) -> bytes: ...

    @abstractmethod
    def error(self, error: RequestRefused) -> bytes:
        """Ends a stream whose headers have gone out already."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Says that the answer is still coming, in a way this provider's clients accept."""


class Dialect(ABC):
    """One provider's API. Holds no state."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    told_in_stream: ClassVar[frozenset[Refusal]] = frozenset()
    """Refusals that this provider's clients understand only as an event of the stream they asked for."""
    key_headers: ClassVar[tuple[str, ...]] = ()
    """Where this provider's clients put a key that is no bearer token."""
    hint_headers: ClassVar[Mapping[str, str]] = {}
    """Headers worth keeping with a completion, and the name each is kept under."""

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """The session key the client presents: a bearer token, or wherever else its clients put it."""
        for header in self.key_headers:
            if given := headers.get(header, "").strip():
                return given
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None

    def claims(self, headers: Mapping[str, str]) -> bool:
        """Whether a request to an address that several dialects have, or none, is in this one's words."""
        return False

    def hints(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """What a request's headers tell of the harness's own agents; never who is asking.

        Recordings that people read hold it: printable and short, whatever the client sent.
        """
        told = ((name, headers.get(header, "")) for header, name in self.hint_headers.items())
        return {name: value[:_LONGEST_HINT] for name, value in told if value and value.isprintable()}

    @abstractmethod
    def parse(self, request: HttpRequest) -> ChatRequest:
        """The request in no provider's words; RequestRefused names the field that is wrong."""

    @abstractmethod
    def respond(self, identity: CallIdentity, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
        """The whole answer; `answers` has one for each choice that the request asks for."""

    @abstractmethod
    def stream(self, identity: CallIdentity, request: ChatRequest) -> Sequence[StreamEncoder]:
        """An encoder for each choice that the request asks for: their bytes share one stream."""

    @abstractmethod
    def error(self, error: RequestRefused) -> HttpAnswer: ...

    def models(self, model: str, max_context: int, created: int) -> bytes:
        """The answer to LIST_MODELS; this and the next two only where a route asks for it."""
        raise NotImplementedError(f"{self.name} has no route that lists models")

    def shown(self, request: HttpRequest) -> str:
        """The model that SHOW_MODEL asks for."""
        return request.model or ""

    def model(self, model: str, max_context: int, created: int) -> bytes:
        """The answer to SHOW_MODEL."""
        raise NotImplementedError(f"{self.name} has no route that shows a model")

    def token_count(self, count: int) -> bytes:
        """The answer to COUNT_TOKENS."""
        raise NotImplementedError(f"{self.name} has no route that counts tokens")
