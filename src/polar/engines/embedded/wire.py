"""The subset of vLLM's HTTP bodies that the embedded engine takes and gives.

Beyond vLLM, every answer and every chunk carries `policy_version` at its root.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from polar.models.chat import FinishReason
from polar.rendering.constraints import Constraint


class BadRequest(Exception):
    """A request the engine refuses: the status, the field at fault, and a message that names it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class StreamOptions(BaseModel):
    include_usage: bool = False


_ANY_OBJECT = Constraint(json_schema='{"type": "object"}')


class StructuredOutputs(BaseModel):
    """Constraints on the sampled text; vLLM's other kinds (regex, choice, grammar) are refused."""

    model_config = ConfigDict(extra="forbid")

    schema_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    structural_tag: str | None = None

    @property
    def constraint(self) -> Constraint:
        if self.structural_tag is not None:
            return Constraint(structural_tag=self.structural_tag)
        if self.schema_ is None:
            return _ANY_OBJECT
        text = self.schema_ if isinstance(self.schema_, str) else orjson.dumps(self.schema_).decode()
        return Constraint(json_schema=text)

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        if sum(kind is not None for kind in (self.schema_, self.json_object, self.structural_tag)) != 1:
            raise ValueError("give one of json, json_object and structural_tag")
        return self


class JsonSchema(BaseModel):
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's format for structured outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def constraint(self) -> Constraint | None:
        if self.type == "json_schema":
            schema = self.json_schema.schema_ if self.json_schema is not None else {}
            return Constraint(json_schema=orjson.dumps(schema).decode())
        return _ANY_OBJECT if self.type == "json_object" else None


class LoadWeightsBody(BaseModel):
    """A weight update; see `WeightUpdate`."""

    model_config = ConfigDict(extra="forbid")

    version: StrictInt = Field(ge=0, lt=2**31)
    path: str | None = Field(default=None, min_length=1)


class _Body(BaseModel):
    """Unknown fields are ignored, as vLLM does; those that would change the sampling are refused."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: StrictInt | None = Field(default=None, ge=-1)
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: Literal[1] | None = None
    min_p: Literal[0] | None = None
    min_tokens: Literal[0] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: list[str] | None = Field(default=None, max_length=0)

    @property
    def constraint(self) -> Constraint | None:
        return self.structured_outputs.constraint if self.structured_outputs is not None else None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(_Body):
    prompt: Any
    max_tokens: StrictInt | None = Field(default=16, ge=1)
    logprobs: StrictInt | None = Field(default=None, ge=0, le=1)
    """Any number asks for the sampled tokens' logprobs; alternatives are not returned."""
    prompt_logprobs: Literal[0] | None = None
    """0 asks for the logprobs of the prompt's own tokens, at temperature 1 and nothing cut, as in vLLM."""


class ChatBody(_Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_tokens: StrictInt | None = Field(default=None, ge=1)
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: None = None

    @property
    def constraint(self) -> Constraint | None:
        return super().constraint or (self.response_format.constraint if self.response_format else None)


class TokenizeBody(BaseModel):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Tokens:
    """A run of sampled tokens with the text that became certain: a chunk, or a whole answer."""

    ids: list[int]
    texts: list[str]
    """The text of each token."""
    logprobs: list[float]
    text: str
    policy_version: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    """One entry per prompt token, None for the first; None if not requested."""


@dataclass(frozen=True, slots=True)
class WireAnswer(ABC):
    """The fields shared by all chunks of an answer, and their encoding."""

    chunk_kind: ClassVar[str]

    id: str
    model: str
    prompt_ids: list[int]
    returns_ids: bool
    returns_logprobs: bool

    @abstractmethod
    def whole(self, tokens: Tokens) -> dict[str, Any]: ...

    @abstractmethod
    def chunks(self, tokens: Tokens, *, is_first: bool) -> list[dict[str, Any]]: ...

    def last_chunk(self, policy_version: int, usage: dict[str, Any]) -> dict[str, Any]:
        return self._root(self.chunk_kind, policy_version) | {"usage": usage}

    def usage(self, sampled: int, cached: int) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": sampled,
            "total_tokens": len(self.prompt_ids) + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _root(self, kind: str, policy_version: int, *choices: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "policy_version": policy_version,
            "choices": choices,
        }

    def _choice(self, tokens: Tokens, logprobs: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": 0,
            "logprobs": logprobs if self.returns_logprobs else None,
            "finish_reason": tokens.finish_reason,
            "stop_reason": tokens.stop_reason,
        }
        return choice | {"token_ids": tokens.ids} if self.returns_ids else choice


class CompletionAnswer(WireAnswer):
    """Chunks of a /v1/completions answer."""

    chunk_kind = "text_completion"

    def whole(self, tokens: Tokens) -> dict[str, Any]:
        return self._body(tokens, is_first=True)

    def chunks(self, tokens: Tokens, *, is_first: bool) -> list[dict[str, Any]]:
        return [self._body(tokens, is_first=is_first)]

    def _body(self, tokens: Tokens, *, is_first: bool) -> dict[str, Any]:
        logprobs = {"tokens": tokens.texts, "token_logprobs": tokens.logprobs, "top_logprobs": None}
        choice = self._choice(tokens, logprobs) | {"text": tokens.text}
        if self.returns_ids:
            choice["prompt_token_ids"] = self.prompt_ids if is_first else None
        if tokens.prompt_logprobs is not None:
            choice["prompt_logprobs"] = tokens.prompt_logprobs
        return self._root(self.chunk_kind, tokens.policy_version, choice)


class ChatAnswer(WireAnswer):
    """Chunks of a /v1/chat/completions answer."""

    chunk_kind = "chat.completion.chunk"

    def whole(self, tokens: Tokens) -> dict[str, Any]:
        message = {"role": "assistant", "content": tokens.text, "tool_calls": []}
        choice = self._chat_choice(tokens) | {"message": message}
        return self._with_prompt(self._root("chat.completion", tokens.policy_version, choice))

    def chunks(self, tokens: Tokens, *, is_first: bool) -> list[dict[str, Any]]:
        """The role and the prompt's ids are in a chunk of their own, before the first token."""
        written = [self._chat_choice(tokens) | {"delta": {"content": tokens.text}}]
        if is_first:
            delta = {"role": "assistant", "content": ""}
            written.insert(0, {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})
        chunks = [self._root(self.chunk_kind, tokens.policy_version, choice) for choice in written]
        return [self._with_prompt(chunks[0]), *chunks[1:]] if is_first else chunks

    def _with_prompt(self, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"prompt_token_ids": self.prompt_ids} if self.returns_ids else body

    def _chat_choice(self, tokens: Tokens) -> dict[str, Any]:
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(tokens.texts, tokens.logprobs, strict=True)
        ]
        return self._choice(tokens, {"content": content})


def error_body(error: BadRequest) -> dict[str, Any]:
    kinds = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError"}
    kind = kinds.get(error.status, "InternalServerError")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.status}}
