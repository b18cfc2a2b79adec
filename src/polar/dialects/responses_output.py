"""Answers of OpenAI's Responses: the response object, its output items, and both as a stream of events."""

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
"""Begins the tokens that stand for reasoning, so that those of other providers are not taken for ours."""

_ITEM_ID = re.compile(r"([a-z]+)_([0-9a-f]+)_([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the answer must know of the request."""

    toolbox: Toolbox
    echo: Mapping[str, Any]
    """The fields of the request that the response repeats."""
    response_suffix: str = ""
    """Follows the completion's id in that of the response."""
    sealed: bool = False
    """Whether reasoning items carry `encrypted_content`."""
    summarised: bool = False
    """Whether reasoning is shown as a summary, as the client asked, and not as its text."""


def response(
    identity: CallIdentity,
    asked: Asked,
    status: str,
    output: Sequence[Mapping[str, Any]] = (),
    usage: Usage | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "id": f"resp_{identity.id}{asked.response_suffix}",
        "object": "response",
        "created_at": identity.created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": identity.model,
        "output": list(output),
        "usage": _usage(usage) if usage is not None else None,
        **asked.echo,
    }


def status_of(finish_reason: FinishReason) -> str:
    return "incomplete" if finish_reason is FinishReason.LENGTH else "completed"


def place(identity: CallIdentity, index: int) -> str:
    """What follows the kind in an item's id: whose output it is, and which of its kind.

    Calls are counted by themselves, so that their ids tell which they are; other items by where they stand.
    """
    return f"{identity.id}_{index}"


@dataclass(frozen=True, slots=True)
class ItemId:
    kind: str
    completion: str
    index: int


def item_id(text: str | None) -> ItemId | None:
    """An item's id in its parts; None if it is not one of ours."""
    match = _ITEM_ID.fullmatch(text or "")
    return ItemId(match[1], match[2], int(match[3])) if match else None


def message_item(id: str, content: Sequence[Mapping[str, Any]], status: str) -> dict[str, Any]:
    return {"id": f"msg_{id}", "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_item(id: str, text: str, asked: Asked) -> dict[str, Any]:
    """A reasoning item; without text it is the one that a stream begins with."""
    shown = [reasoning_part(text, asked)] if text else []
    item: dict[str, Any] = {"id": f"rs_{id}", "type": "reasoning", "summary": []}
    item |= {"summary": shown} if asked.summarised else {"content": shown}
    return item | {"encrypted_content": seal(text) if text else ""} if asked.sealed else item


def reasoning_part(text: str, asked: Asked) -> dict[str, Any]:
    return {"type": "summary_text" if asked.summarised else "reasoning_text", "text": text}


def seal(text: str) -> str:
    """Reasoning as a token that means nothing to a client and comes back unchanged."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def unsealed(token: str) -> str | None:
    """The reasoning a token stands for; None if it is not one of ours."""
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
"""Codes that clients do not try again; all else is the server's fault, and they do."""

_FILLED = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Calls that are streamed empty and then filled: which field, by which events."""


class _Open(Enum):
    """The item that text is being added to."""

    NOTHING = auto()
    REASONING = auto()
    MESSAGE = auto()


class ResponsesStream(StreamEncoder):
    """One item at a time: each is closed before the next begins."""

    def __init__(self, identity: CallIdentity, asked: Asked) -> None:
        self._identity = identity
        self._asked = asked
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open = _Open.NOTHING
        self._text: list[str] = []
        self._blank = ""
        """White space that begins a message only if text follows it."""
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
        item = self._asked.toolbox.item_of(call, place(self._identity, self._calls))
        filled = _FILLED.get(item["type"])
        begun = item | {"status": "in_progress"} | ({filled[0]: ""} if filled else {})
        events.append(self._event("output_item.added", output_index=self._index, item=begun))
        if filled is not None:
            field, name = filled
            events.append(self._of_item(f"{name}.delta", item["id"], delta=item[field]))
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            events.append(self._of_item(f"{name}.done", item["id"], **named, **{field: item[field]}))
        events.append(self._done(item))
        self._has_spoken = True
        self._calls += 1
        return b"".join(events)

    def finish(self, finish_reason: FinishReason, usage: Usage, stop_sequence: str | None = None) -> bytes:
        status = status_of(finish_reason)
        events = [self._close(status)]
        if not self._has_spoken:
            # An answer of nothing is still a turn, which the client must be able to echo.
            events += [self._open_message(), self._close(status)]
        events.append(self._lifecycle(status, status, usage=usage))
        return b"".join(events)

    def error(self, error: RequestRefused) -> bytes:
        told = {"code": _CODES.get(error.refusal, "server_error"), "message": error.message}
        return self._lifecycle("failed", "failed", error=told)

    def keep_alive(self) -> bytes:
        # Comments do not reset Codex's timer; an event that says what is known already does.
        return self._lifecycle("in_progress", "in_progress")

    @property
    def _index(self) -> int:
        """Of the item at work; finished ones are in the output."""
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
        begun = reasoning_item(self._item_id, "", self._asked)
        return self._event("output_item.added", output_index=self._index, item=begun) + self._of_part(
            f"{self._reasoning_part}.added", part=reasoning_part("", self._asked)
        )

    def _close(self, status: str = "completed") -> bytes:
        """End the open item, if there is one."""
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
                part = reasoning_part(text, self._asked)
                item = reasoning_item(self._item_id, text, self._asked)
                events = self._of_part(f"{self._reasoning_text}.done", text=text)
                events += self._of_part(f"{self._reasoning_part}.done", part=part)
        self._open = _Open.NOTHING
        return events + self._done(item)

    @property
    def _reasoning_text(self) -> str:
        return "reasoning_summary_text" if self._asked.summarised else "reasoning_text"

    @property
    def _reasoning_part(self) -> str:
        return "reasoning_summary_part" if self._asked.summarised else "content_part"

    def _done(self, item: dict[str, Any]) -> bytes:
        event = self._event("output_item.done", output_index=self._index, item=item)
        self._output.append(item)
        return event

    def _of_part(self, name: str, **fields: Any) -> bytes:
        """An event about the only part of the open item."""
        is_summary = self._open is _Open.REASONING and self._asked.summarised
        prefix = "rs" if self._open is _Open.REASONING else "msg"
        place = {"summary_index" if is_summary else "content_index": 0}
        return self._of_item(name, f"{prefix}_{self._item_id}", **place, **fields)

    def _of_item(self, name: str, id: str, /, **fields: Any) -> bytes:
        return self._event(name, item_id=id, output_index=self._index, **fields)

    def _lifecycle(self, name: str, status: str, **fields: Any) -> bytes:
        output = [] if status == "in_progress" else self._output
        return self._event(name, response=response(self._identity, self._asked, status, output, **fields))

    def _event(self, name: str, /, **fields: Any) -> bytes:
        body = {"type": f"response.{name}", "sequence_number": self._sequence} | fields
        self._sequence += 1
        return b"event: response." + name.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
