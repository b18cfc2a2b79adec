"""The provider-free chat vocabulary that dialects translate to and renderers turn into tokens.

These are frozen dataclasses, not pydantic models: one is built for every message of every
request on the gateway's hot path, after the dialect has validated the provider's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class FinishReason(StrEnum):
    """Why a completion stopped."""

    STOP = "stop"
    """The model ended its turn, or a stop sequence matched."""
    LENGTH = "length"
    """A token limit was reached."""
    TOOL_CALLS = "tool_calls"
    """The model ended its turn with at least one complete tool call."""
    CANCELLED = "cancelled"
    """The client went away before the model was done."""
    ERROR = "error"
    """The engine failed after it had begun to answer."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call the model asked for."""

    id: str
    """Made up by the gateway, unique in the session; never part of a message's identity."""
    name: str
    arguments: str
    """JSON text exactly as sampled, or as the harness re-serialised it when it echoes the call."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. Images will go here; until then, placeholders in `content` name them."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Set on tool messages: which call this answers."""
    name: str | None = None

    @property
    def length(self) -> int:
        """Characters of everything that it says; at least 1, as no message is rendered as nothing."""
        said = 1 + len(self.content) + len(self.reasoning or "")
        return said + sum(len(call.name) + len(call.arguments) for call in self.tool_calls)


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One function the harness offers to the model."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. None means: not asked for, the engine's default applies."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token id → what is added to its logit before sampling."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer holds already."""
    frequency_penalty: float = 0.0
    """As `presence_penalty`, once for each time that the answer holds it."""

    @property
    def is_penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def is_reshaped(self) -> bool:
        """Whether tokens are drawn from other logits than the model's own."""
        return bool(self.logit_bias) or self.is_penalised


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token as a client sees it."""

    token: bytes
    """May be a part of a character; control tokens are spelt out."""
    logprob: float


class ToolUse(StrEnum):
    """Whether the model may, must or must not call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the harness says about calling tools in this turn."""

    use: ToolUse = ToolUse.AUTO
    names: tuple[str, ...] = ()
    """The tools it may choose among; empty means any of those offered."""
    parallel: bool = True
    """Whether one turn may hold more than one call."""


@dataclass(frozen=True, slots=True)
class JsonOutput:
    """The answer's text must be JSON, and match `schema` where there is one."""

    schema: Mapping[str, Any] | None = None
    name: str = "answer"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a harness asks of the model, in no provider's words."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    output: JsonOutput | None = None
    """None: free text."""
    sampling: Sampling = Sampling()
    raw: str | tuple[int, ...] | None = None
    """A text, or its token ids, that is continued as it is, without a chat template; `messages` then only
    show it. None: a chat."""
    choices: int = 1
    """How many answers to the same messages are asked for."""
    is_begun: bool = False
    """Whether the last message, the assistant's, is the beginning of the answer (a prefill)."""
    logprobs: bool = False
    """Whether the client wants the logprobs of the sampled tokens."""
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream must end with a usage chunk (OpenAI's stream_options.include_usage)."""
    omitted: Mapping[str, int] = field(default_factory=dict)
    """Parts of the request that are no text, by kind: a placeholder stands for each in `messages`."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """What the client says of its own doings (which of its agents asks), recorded and never believed."""
    wire: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect must remember of the request to word its answer; nobody else reads it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one completion took, in tokens and in time."""

    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Of the sampled ones, those that the model thought in."""
    waited_seconds: float = 0.0
    """From the request to its first token."""
    sampling_seconds: float = 0.0
    """From its first token to its last."""
