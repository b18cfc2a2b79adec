"""OpenAI's chat completions as engines speak them: a chat call → JSON, and the answer → chunks.

An answer comes as a stream of events or as one document; both are read by the same reader, so that
what is recorded does not depend on how it was asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from polar.engines.base import ChatCall, ChatChunk, EngineError, TokenChunk
from polar.engines.http import Reader
from polar.models.chat import (
    ChatRequest,
    FinishReason,
    JsonOutput,
    Sampling,
    ToolCall,
    ToolUse,
    Usage,
)
from polar.models.completion import Ids
from polar.rendering.base import MessageDelta
from polar.rendering.template import openai_message, tool_fields

PATH = "/v1/chat/completions"

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.STOP,
}


def request_body(call: ChatCall, model: str, *, stream: bool) -> dict[str, Any]:
    """The fields that every OpenAI-compatible server understands."""
    body = prompt_body(call.chat, model) | sampling_fields(call.sampling)
    if call.chat.output is not None:
        body["response_format"] = _response_format(call.chat.output)
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return body


def prompt_body(chat: ChatRequest, model: str) -> dict[str, Any]:
    """The fields of a call that the chat template sees."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [openai_message(message) for message in chat.messages],
    }
    choice = chat.tool_choice
    # No common server takes a choice among some of the tools: the others are not offered then.
    tools = [tool for tool in chat.tools if not choice.names or tool.name in choice.names]
    if not tools:
        return body
    body["tools"] = [tool_fields(tool) for tool in tools]
    if choice.use is ToolUse.REQUIRED and len(choice.names) == 1:
        body["tool_choice"] = {"type": "function", "function": {"name": choice.names[0]}}
    elif choice.use is not ToolUse.AUTO:
        body["tool_choice"] = choice.use.value
    if not choice.parallel:
        body["parallel_tool_calls"] = False
    return body


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters, as OpenAI and vLLM name them."""
    wishes = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop) or None,
        "logit_bias": {str(id): bias for id, bias in sampling.logit_bias} or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
    }
    return {name: value for name, value in wishes.items() if value is not None}


def _response_format(output: JsonOutput) -> dict[str, Any]:
    if output.schema is None:
        return {"type": "json_object"}
    schema = {"name": output.name, "schema": dict(output.schema), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def weight_version(named: Any) -> int:
    """Parse SGLang's version, which is free text: "default", or no number, is the initial weights. Text
    behind a + is other information."""
    number = str(named).partition("+")[0]
    return int(number) if number.isdecimal() else 0


class ChatReader(Reader[ChatChunk]):
    """Tokens whose ids or logprobs are missing or do not add up do not fail the answer: it is delivered,
    and its last chunk says why it can never be trained."""

    def __init__(
        self,
        url: str,
        version: Callable[[], int],
        stops: tuple[str, ...],
        *,
        has_tokens: bool = True,
        named: Callable[[Any], int] = weight_version,
    ) -> None:
        """`named` parses the version in SGLang's name of its weights."""
        super().__init__(url, version)
        self._named_version = named
        self._stops = stops
        self._begun_with = version()
        self._has_tokens = has_tokens
        self._has_prompt = False
        self._calls = _OpenCalls()
        self._usage: Usage | None = None
        self._untrainable = None if has_tokens else "the engine gives no token ids"

    def chunks(self, events: Iterable[dict[str, Any]]) -> Iterator[ChatChunk]:
        return filter(None, map(self.read, events))

    def read(self, event: dict[str, Any]) -> ChatChunk | None:
        self.raise_error(event)
        try:
            if usage := event.get("usage"):
                self._usage = _usage(usage)
            choices = event.get("choices")
            return self._chunk(event, choices[0]) if choices else None
        except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
            raise EngineError(f"the engine's answer is not one of a chat: {error!r}") from error

    def _chunk(self, event: dict[str, Any], choice: dict[str, Any]) -> ChatChunk | None:
        reason = choice.get("finish_reason")
        tokens = self._new_tokens(event, choice) if self._has_tokens else None
        ids = self._prompt_ids(event, choice) if self._has_tokens else None
        delta = self._delta(choice, is_last=reason is not None)
        if reason is not None:
            if reason not in _FINISH:
                raise EngineError(f"the engine ended the completion with {reason!r}")
            matched = choice.get("stop_reason", choice.get("matched_stop"))
            stop = matched if matched in self._stops else None
            self._held = ChatChunk(delta, tokens, ids, _FINISH[reason], stop_sequence=stop)
        elif delta or tokens or ids is not None:
            self._has_spoken = self._has_spoken or bool(delta)
            return ChatChunk(delta, tokens, ids, untrainable=self._untrainable)
        return None

    def last(self) -> ChatChunk:
        last = super().last()
        return ChatChunk(
            last.delta,
            last.tokens,
            last.prompt_ids,
            last.finish_reason,
            self._usage,
            last.stop_sequence,
            self._why_untrainable(),
        )

    def _why_untrainable(self) -> str | None:
        if self._untrainable is not None:
            return self._untrainable
        if not self._has_prompt:
            return "the engine gave no prompt ids"
        counted = self._usage.sampled_tokens if self._usage else self._tokens
        if counted != self._tokens:
            return f"the engine counts {counted} sampled tokens but sent {self._tokens} token ids"
        return None

    def _delta(self, choice: dict[str, Any], *, is_last: bool) -> MessageDelta:
        part = choice.get("delta") or choice.get("message") or {}
        content = part.get("content") or ""
        if not isinstance(content, str):
            raise EngineError("the engine answered with content that is not text")
        calls = part.get("tool_calls")
        done = self._calls.feed(calls) if calls else ()
        if is_last:
            done += self._calls.finish()
        return MessageDelta(
            content=content,
            reasoning=part.get("reasoning_content") or part.get("reasoning") or "",
            tool_calls=done,
        )

    def _prompt_ids(self, event: dict[str, Any], choice: dict[str, Any]) -> Ids | None:
        if self._has_prompt:
            return None
        ids = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if not ids:
            return None
        self._has_prompt = True
        # Sooner than numpy reads a list.
        return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)

    def _new_tokens(self, event: dict[str, Any], choice: dict[str, Any]) -> TokenChunk | None:
        ids = choice.get("token_ids")
        if ids is None:
            ids = choice.get("response_token_ids")
        entries = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [entry["logprob"] for entry in entries]
        if "message" in choice and self._known_version() != self._begun_with:
            self._untrainable = "the weights were replaced while it was sampled, in one piece"
        if not ids:
            if logprobs:
                self._untrainable = "the engine sent logprobs without token ids"
            return None
        self._tokens += len(ids)
        if len(ids) != len(logprobs) or None in logprobs:
            self._untrainable = f"the engine sent {len(ids)} token ids with {len(logprobs)} logprobs"
            # Aligned all the same, and invalid wherever they are looked at.
            logprobs = [float("nan")] * len(ids)
        return TokenChunk(ids, logprobs, self._version(event, choice.get("meta_info")))

    def _version(self, event: dict[str, Any], meta: Any) -> int:
        if isinstance(meta, dict) and (named := meta.get("weight_version")) is not None:
            return self._named_version(named)
        return int(event.get("policy_version", self._known_version()))


class _OpenCalls:
    """Assembles streamed tool calls; a call is complete when the next begins or the answer ends."""

    def __init__(self) -> None:
        self._index: int | None = None
        self._id = ""
        self._name = ""
        self._arguments: list[str] = []

    def feed(self, pieces: Iterable[dict[str, Any]]) -> tuple[ToolCall, ...]:
        done: tuple[ToolCall, ...] = ()
        for position, piece in enumerate(pieces):
            index = piece.get("index", position)
            if index != self._index:
                done += self.finish()
                self._index = index
            function = piece.get("function") or {}
            self._id = self._id or piece.get("id") or ""
            self._name = self._name or function.get("name") or ""
            self._arguments.append(function.get("arguments") or "")
        return done

    def finish(self) -> tuple[ToolCall, ...]:
        if self._index is None:
            return ()
        call = ToolCall(self._id, self._name, "".join(self._arguments) or "{}")
        self._index, self._id, self._name, self._arguments = None, "", "", []
        return (call,)


def _usage(usage: dict[str, Any]) -> Usage:
    prompt = usage.get("prompt_tokens_details") or {}
    sampled = usage.get("completion_tokens_details") or {}
    return Usage(
        usage.get("prompt_tokens") or 0,
        usage.get("completion_tokens") or 0,
        prompt.get("cached_tokens") or 0,
        sampled.get("reasoning_tokens") or 0,
    )
