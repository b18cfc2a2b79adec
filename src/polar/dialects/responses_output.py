"""What an answer of OpenAI's Responses consists of: the response object and its output items."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polar.dialects.base import CallIdentity
from polar.dialects.responses_tools import Toolbox
from polar.models.chat import FinishReason, Usage

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
