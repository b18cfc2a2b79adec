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
"""Returns the conversation of a completion of the same session, answer included; None if unknown."""


def recall_nothing(_completion: str) -> None:
    return None


class RouteAction(Enum):
    """What a route asks of the gateway."""

    COMPLETE = auto()
    COUNT_TOKENS = auto()
    """Answered with the exact length of the prompt, and never recorded."""
    LIST_MODELS = auto()
    SHOW_MODEL = auto()
    """Asks for one model, named by the path or the body."""
    FIXED = auto()
    """Answered with the route's own `fixed` answer, without a key."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """One address that a dialect answers; several dialects may share one (see `Dialect.claims`)."""

    method: str
    path: str
    """May contain `{name}` parameters, which `parse` gets as `HttpRequest.parameters`."""
    action: RouteAction
    fixed: HttpAnswer | None = None
    is_stream: bool | None = None
    """Whether answers there are streamed; None if the body decides."""


AZURE = "/openai"
"""Prefix of Azure's paths that belong to no deployment.

Azure and Vertex AI serve the APIs of other providers: only the path and the place of the key differ.
"""
AZURE_DEPLOYMENT = "/openai/deployments/{model:.+}"
AZURE_KEY = ("api-key",)


def openai_routes(
    method: str, path: str, action: RouteAction, azure: str, fixed: HttpAnswer | None = None
) -> tuple[Route, ...]:
    """Return the routes of one OpenAI operation: at OpenAI, at Azure today, and at Azure in the past."""
    return tuple(Route(method, f"{at}{path}", action, fixed) for at in ("/v1", f"{AZURE}/v1", azure))


def vertex_models(publisher: str) -> tuple[str, ...]:
    """Return the paths of a publisher's models on Vertex AI, inside a project and outside."""
    return tuple(
        f"/{version}{project}/publishers/{publisher}/models"
        for version in ("v1", "v1beta1")
        for project in ("/projects/{project}/locations/{location}", "")
    )


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A client's request as a dialect reads it."""

    route: Route
    body: bytes
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The parameters of the path."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    recall: Recall = recall_nothing
    """Looks up earlier conversations, for requests that name them instead of repeating them."""

    @property
    def model(self) -> str | None:
        """The model named in the path; None if the body names it."""
        return self.parameters.get("model")


class Refusal(StrEnum):
    """Why a request gets no completion; each dialect uses its provider's wording."""

    UNKNOWN_KEY = "unknown_key"
    SESSION_ENDED = "session_ended"
    UNKNOWN_ROUTE = "unknown_route"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_RESPONSE = "unknown_response"
    """The request continues a response that this session does not have."""
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    CONTEXT_OVERFLOW = "context_overflow"
    BUDGET_SPENT = "budget_spent"
    OVER_QUOTA = "over_quota"
    """Too much of the session is in flight; the request will succeed once some of it has finished."""
    ENGINE_FAILED = "engine_failed"
    ENGINE_DOWN = "engine_down"
    INTERNAL = "internal"


class RequestRefused(PolarError):
    """A request that is answered with an error; `field` names the offending part of the body.

    On CONTEXT_OVERFLOW, `limit` is the size of the context and `tokens` that of the prompt, where known:
    harnesses read both from the provider's wording.
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
    """What a provider includes in every answer."""

    id: str
    model: str
    created: int
    """The time in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished completion, ready for the client."""

    message: Message
    finish_reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    """The stop sequence of the request that ended the answer, if any."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """The logprob of every sampled token, if the request asks for them."""


def usage_of_all(usages: Sequence[Usage]) -> Usage:
    """Add up the usage of several answers to one prompt, counting the prompt once."""
    return Usage(
        usages[0].prompt_tokens,
        sum(usage.sampled_tokens for usage in usages),
        max(usage.cached_tokens for usage in usages),
        sum(usage.reasoning_tokens for usage in usages),
        max(usage.waited_seconds for usage in usages),
        max(usage.sampling_seconds for usage in usages),
    )


class StreamEncoder(ABC):
    """Writes one streamed answer; every method returns the bytes to send now, possibly none."""

    content_type: ClassVar[str] = "text/event-stream"

    def start(self) -> bytes:
        """Return what is sent with the headers, before the engine has answered."""
        return b""

    @abstractmethod
    def text(self, text: str) -> bytes: ...

    @abstractmethod
    def reasoning(self, text: str) -> bytes: ...

    @abstractmethod
    def tool_call(self, call: ToolCall) -> bytes: ...

    def logprobs(self, sampled: tuple[TokenLogprob, ...]) -> bytes:
        """Write the logprobs of the tokens sampled since the last call, if the request asks for them."""
        return b""

    @abstractmethod
    def finish(
        self, finish_reason: FinishReason, usage: Usage, stop_sequence: str | None = None
    ) -> bytes: ...

    @abstractmethod
    def error(self, error: RequestRefused) -> bytes:
        """End a stream whose headers have already been sent."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Tell the client that the answer is still coming, in a form that this provider's clients accept."""


class Dialect(ABC):
    """One provider's API, without state."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    told_in_stream: ClassVar[frozenset[Refusal]] = frozenset()
    """Refusals that this provider's clients understand only as an event in the stream."""
    key_headers: ClassVar[tuple[str, ...]] = ()
    """Headers in which this provider's clients send their key, if not as a bearer token."""
    hint_headers: ClassVar[Mapping[str, str]] = {}
    """Headers to store with a completion, and the name each is stored under."""

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """Return the session key of a request: a bearer token, or wherever this provider's clients put it."""
        for header in self.key_headers:
            if given := headers.get(header, "").strip():
                return given
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None

    def claims(self, headers: Mapping[str, str]) -> bool:
        """Whether this dialect should answer a request to a path that several dialects, or none, have."""
        return False

    def hints(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return what the headers say about the harness's own agents, short and printable for recordings."""
        told = ((name, headers.get(header, "")) for header, name in self.hint_headers.items())
        return {name: value[:_LONGEST_HINT] for name, value in told if value and value.isprintable()}

    @abstractmethod
    def parse(self, request: HttpRequest) -> ChatRequest:
        """Parse a request into the provider-neutral form; RequestRefused names the field at fault."""

    @abstractmethod
    def respond(self, identity: CallIdentity, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
        """Encode a whole answer; `answers` has one entry per choice of the request."""

    @abstractmethod
    def stream(self, identity: CallIdentity, request: ChatRequest) -> Sequence[StreamEncoder]:
        """Return one encoder per choice of the request; together they write one stream."""

    @abstractmethod
    def error(self, error: RequestRefused) -> HttpAnswer: ...

    def models(self, model: str, max_context: int, created: int) -> bytes:
        """Encode the answer to LIST_MODELS, for dialects with such a route."""
        raise NotImplementedError(f"{self.name} has no route that lists models")

    def shown(self, request: HttpRequest) -> str:
        """Return the model that a SHOW_MODEL request asks for."""
        return request.model or ""

    def model(self, model: str, max_context: int, created: int) -> bytes:
        """Encode the answer to SHOW_MODEL, for dialects with such a route."""
        raise NotImplementedError(f"{self.name} has no route that shows a model")

    def token_count(self, count: int) -> bytes:
        """Encode the answer to COUNT_TOKENS, for dialects with such a route."""
        raise NotImplementedError(f"{self.name} has no route that counts tokens")
