"""One provider's wire format as pure functions: request → chat request, completion → response, errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import ClassVar

from polar.errors import PolarError
from polar.models.chat import ChatRequest, FinishReason, Message, ToolCall, Usage


class Action(Enum):
    """What a route asks of the gateway."""

    COMPLETE = auto()
    LIST_MODELS = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """One address a dialect answers at."""

    method: str
    path: str
    """May hold `{name}` parameters; they reach `parse` as `path_parameters`."""
    action: Action


class Refusal(StrEnum):
    """Why a request gets no completion; each dialect says it in its provider's words."""

    UNKNOWN_KEY = "unknown_key"
    SESSION_ENDED = "session_ended"
    UNKNOWN_ROUTE = "unknown_route"
    UNKNOWN_MODEL = "unknown_model"
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    CONTEXT_OVERFLOW = "context_overflow"
    BUDGET_SPENT = "budget_spent"
    ENGINE_FAILED = "engine_failed"
    ENGINE_DOWN = "engine_down"
    INTERNAL = "internal"


class RequestRefused(PolarError):
    """A request that is answered with an error; `field` names the part of the body at fault."""

    def __init__(self, refusal: Refusal, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.field = field


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    status: int
    body: bytes
    headers: Mapping[str, str]


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


class StreamEncoder(ABC):
    """Writes one streamed answer. Every method returns the bytes to send now, possibly none."""

    content_type: ClassVar[str] = "text/event-stream"

    @abstractmethod
    def start(self) -> bytes:
        """Sent with the headers, before the engine has said anything."""

    @abstractmethod
    def text(self, text: str) -> bytes: ...

    @abstractmethod
    def reasoning(self, text: str) -> bytes: ...

    @abstractmethod
    def tool_call(self, call: ToolCall) -> bytes: ...

    @abstractmethod
    def finish(self, finish_reason: FinishReason, usage: Usage) -> bytes: ...

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

    @abstractmethod
    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """The session key the client presents, wherever this provider's clients put it."""

    @abstractmethod
    def parse(self, body: bytes, path_parameters: Mapping[str, str]) -> ChatRequest:
        """The request in no provider's words; RequestRefused names the field that is wrong."""

    @abstractmethod
    def respond(self, identity: CallIdentity, answer: Answer) -> bytes: ...

    @abstractmethod
    def stream(self, identity: CallIdentity, request: ChatRequest) -> StreamEncoder: ...

    @abstractmethod
    def models(self, model: str, max_context: int, created: int) -> bytes: ...

    @abstractmethod
    def error(self, error: RequestRefused) -> ErrorAnswer: ...
