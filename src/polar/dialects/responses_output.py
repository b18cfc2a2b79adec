"""Answers of OpenAI's Responses API: the response object, its output items, and their event streams."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

from polar.dialects.base import CallIdentity, Refusal, RequestRefused, StreamEncoder
from polar.dialects.responses_tools import Toolbox
from polar.models.chat import FinishReason, ToolCall, Usage

_SEAL = "polar.reasoning.1."
"""Starts our tokens for sealed reasoning, which sets them apart from other providers'."""

_ITEM_ID = re.compile(r"([a-z]+)_([0-9a-f]+)_([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What an answer needs to know about its request."""

    toolbox: Toolbox
    echo: Mapping[str, Any]
    response_suffix: str = ""
    """Appended to the completion's id to form that of the response."""
    sealed: bool = False
    summarised: bool = False
    """Whether reasoning is shown as a summary, as the client asked, instead of as text."""


def response(
    identity: CallIdentity,
    options: ResponseOptions,
    status: str,
    output: Sequence[Mapping[str, Any]] = (),
    usage: Usage | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "id": f"resp_{identity.id}{options.response_suffix}",
        "object": "response",
        "created_at": identity.created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": identity.model,
        "output": list(output),
        "usage": _usage(usage) if usage is not None else None,
        **options.echo,
    }


def status_of(finish_reason: FinishReason) -> str:
    return "incomplete" if finish_reason is FinishReason.LENGTH else "completed"


def place(identity: CallIdentity, index: int) -> str:
    """Return the part of an item's id after its kind; calls are numbered apart from other items."""
    return f"{identity.id}_{index}"


@dataclass(frozen=True, slots=True)
class ItemId:
    kind: str
    completion: str
    index: int


def item_id(text: str | None) -> ItemId | None:
    """Parse an item's id; return None if it is not one of ours."""
    match = _ITEM_ID.fullmatch(text or "")
    return ItemId(match[1], match[2], int(match[3])) if match else None


def message_item(id: str, content: Sequence[Mapping[str, Any]], status: str) -> dict[str, Any]:
    return {"id": f"msg_{id}", "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_item(id: str, text: str, options: ResponseOptions) -> dict[str, Any]:
    """Return a reasoning item; a stream begins with one that has no text."""
    shown = [reasoning_part(text, options)] if text else []
    item: dict[str, Any] = {"id": f"rs_{id}", "type": "reasoning", "summary": []}
    item |= {"summary": shown} if options.summarised else {"content": shown}
    return item | {"encrypted_content": seal(text) if text else ""} if options.sealed else item


def reasoning_part(text: str, options: ResponseOptions) -> dict[str, Any]:
    return {"type": "summary_text" if options.summarised else "reasoning_text", "text": text}


def seal(text: str) -> str:
    """Encode reasoning as an opaque token that clients send back unchanged."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def unseal(token: str) -> str | None:
    """Return the reasoning in a token; None if it is not one of ours."""
    if not token.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(token.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
    }


_CODES = {
    Refusal.CONTEXT_OVERFLOW: "context_length_exceeded",
    Refusal.BUDGET_SPENT: "insufficient_quota",
    Refusal.MALFORMED: "invalid_prompt",
}
"""Codes that clients do not retry; they retry any other as a server error."""

_FILLED = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""The field of a streamed call that is sent separately, and the name of its events."""


class _Open(Enum):
    NOTHING = auto()
    REASONING = auto()
    MESSAGE = auto()


class ResponsesStream(StreamEncoder):
    """Writes one item at a time, closing each before the next begins."""

    def __init__(self, identity: CallIdentity, options: ResponseOptions) -> None:
        self._identity = identity
        self._options = options
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open = _Open.NOTHING
        self._text: list[str] = []
        self._blank = ""
        """White space that is sent only if text follows it."""
        self._has_spoken = False
        self._calls = 0

    def start(self) -> bytes:
        return self._lifecycle("created", "in_progress") + self._lifecycle("in_progress", "in_progress")

    def text(self, text: str) -> bytes:
        opening = b""
        if self._open is not _Open.MESSAGE:
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return b""
            opening = self._close() + self._open_message()
        self._text.append(text)
        return opening + self._of_part("output_text.delta", delta=text, logprobs=[])

    def reasoning(self, text: str) -> bytes:
        opening = b"" if self._open is _Open.REASONING else self._close() + self._open_reasoning()
        self._text.append(text)
        return opening + self._of_part(f"{self._reasoning_text}.delta", delta=text)

    def tool_call(self, call: ToolCall) -> bytes:
        events = [self._close()]
        item = self._options.toolbox.item_of(call, place(self._identity, self._calls))
        filled = _FILLED.get(item["type"])
        begun = item | {"status": "in_progress"} | ({filled[0]: ""} if filled else {})
        events.append(self._event("output_item.added", output_index=self._index, item=begun))
        if filled is not None:
            field, name = filled
            events.append(self._of_item(f"{name}.delta", item["id"], delta=item[field]))
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            events.append(self._of_item(f"{name}.done", item["id"], **named, **{field: item[field]}))
        events.append(self._end_item(item))
        self._has_spoken = True
        self._calls += 1
        return b"".join(events)

    def finish(self, finish_reason: FinishReason, usage: Usage, stop_sequence: str | None = None) -> bytes:
        status = status_of(finish_reason)
        events = [self._close(status)]
        if not self._has_spoken:
            # An empty answer is still a turn, which the client must be able to echo.
            events += [self._open_message(), self._close(status)]
        events.append(self._lifecycle(status, status, usage=usage))
        return b"".join(events)

    def error(self, error: RequestRefused) -> bytes:
        told = {"code": _CODES.get(error.refusal, "server_error"), "message": error.message}
        return self._lifecycle("failed", "failed", error=told)

    def keep_alive(self) -> bytes:
        # Codex's timer is reset by a repeated event but not by a comment.
        return self._lifecycle("in_progress", "in_progress")

    @property
    def _index(self) -> int:
        """The position of the current item; finished ones are in the output."""
        return len(self._output)

    @property
    def _item_id(self) -> str:
        return place(self._identity, self._index)

    def _open_message(self) -> bytes:
        self._open, self._has_spoken = _Open.MESSAGE, True
        begun = message_item(self._item_id, [], "in_progress")
        return self._event("output_item.added", output_index=self._index, item=begun) + self._of_part(
            "content_part.added", part=text_part("")
        )

    def _open_reasoning(self) -> bytes:
        self._open = _Open.REASONING
        begun = reasoning_item(self._item_id, "", self._options)
        return self._event("output_item.added", output_index=self._index, item=begun) + self._of_part(
            f"{self._reasoning_part}.added", part=reasoning_part("", self._options)
        )

    def _close(self, status: str = "completed") -> bytes:
        text, self._text = "".join(self._text), []
        match self._open:
            case _Open.NOTHING:
                return b""
            case _Open.MESSAGE:
                part = text_part(text)
                item = message_item(self._item_id, [part], status)
                events = self._of_part("output_text.done", text=text, logprobs=[])
                events += self._of_part("content_part.done", part=part)
            case _Open.REASONING:
                part = reasoning_part(text, self._options)
                item = reasoning_item(self._item_id, text, self._options)
                events = self._of_part(f"{self._reasoning_text}.done", text=text)
                events += self._of_part(f"{self._reasoning_part}.done", part=part)
        self._open = _Open.NOTHING
        return events + self._end_item(item)

    @property
    def _reasoning_text(self) -> str:
        return "reasoning_summary_text" if self._options.summarised else "reasoning_text"

    @property
    def _reasoning_part(self) -> str:
        return "reasoning_summary_part" if self._options.summarised else "content_part"

    def _end_item(self, item: dict[str, Any]) -> bytes:
        event = self._event("output_item.done", output_index=self._index, item=item)
        self._output.append(item)
        return event

    def _of_part(self, name: str, **fields: Any) -> bytes:
        """Write an event about the only part of the open item."""
        is_summary = self._open is _Open.REASONING and self._options.summarised
        prefix = "rs" if self._open is _Open.REASONING else "msg"
        place = {"summary_index" if is_summary else "content_index": 0}
        return self._of_item(name, f"{prefix}_{self._item_id}", **place, **fields)

    def _of_item(self, name: str, id: str, /, **fields: Any) -> bytes:
        return self._event(name, item_id=id, output_index=self._index, **fields)

    def _lifecycle(self, name: str, status: str, **fields: Any) -> bytes:
        output = [] if status == "in_progress" else self._output
        return self._event(name, response=response(self._identity, self._options, status, output, **fields))

    def _event(self, name: str, /, **fields: Any) -> bytes:
        body = {"type": f"response.{name}", "sequence_number": self._sequence} | fields
        self._sequence += 1
        return b"event: response." + name.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
