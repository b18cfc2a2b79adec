"""A session's completions on disk: an append-only log that holds each token once and survives kill -9.

A completion is written as what it adds to an earlier one, its base: how many tokens and messages of
the base's context it begins with, and what follows. That is all of the parent where the parent is
extended, and what they have in common where the next prompt holds the answer in other tokens. A record
goes to the operating system in a single write, so a killed process tears at most the last one.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from polar.errors import NotFound
from polar.gateway.capture_reader import Capture, CaptureError, parse_capture
from polar.gateway.frames import FAMILY, MAGIC, Frame, frame, frames
from polar.models.chat import Message, ToolDefinition
from polar.models.completion import Completion, Ids, common_prefix

__all__ = ["Capture", "CaptureError", "CaptureWriter", "parse_capture", "read_capture"]

_OPENING = 32
"""Prompts that begin with as many equal tokens are taken to have more in common."""


def read_capture(path: Path) -> list[Completion]:
    """Every completion that was written, in order, each with its full prompt; CaptureError if one is lost."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"{path}: no such capture") from None
    capture = parse_capture(data, path)
    if capture.faults:
        fault = capture.faults[0]
        raise CaptureError(f"{path}: completion {fault.completion or 'unknown'}: {fault.problem}")
    return list(capture.completions)


@dataclass(slots=True, eq=False)
class _Written:
    """What later completions may share with one that is written."""

    id: str
    prompt_ids: Ids
    """Empty once it has an heir, whose prompt holds these tokens too: a conversation is kept once."""
    sampled_ids: Ids
    length: int
    """Of its context: prompt and sampled ids."""
    messages: tuple[Message, ...]
    """The sampled one included."""
    heir: _Written | None = None
    """The first completion that extends it."""

    def common_prefix(self, ids: Ids) -> int:
        """How many tokens its context and `ids` begin with in common."""
        latest = self
        while latest.heir is not None:
            latest = latest.heir
        shared = common_prefix(ids, latest.prompt_ids)
        if latest is self and shared == len(self.prompt_ids):
            shared += common_prefix(ids[shared:], self.sampled_ids)
        return min(shared, self.length)

    def inherit(self, heir: _Written) -> None:
        if self.heir is None:
            self.heir, self.prompt_ids = heir, self.prompt_ids[:0]


class CaptureWriter:
    """Appends completions to one session's log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known_tools: set[str] = set()
        self._latest_tools: tuple[tuple[ToolDefinition, ...], str | None] = ((), None)
        self._written: dict[str, _Written] = {}
        self._openings: dict[bytes, _Written] = {}
        """The first tokens of a prompt → the latest completion whose prompt has them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.length = _sound_length(path.read_bytes())
        os.ftruncate(self._file, self.length)
        if self.length == 0:
            self._write(MAGIC)

    def append(self, completion: Completion) -> None:
        tools = self._append_tools(completion.tools)
        prompt = np.ascontiguousarray(completion.prompt_ids, np.int32)
        base, shared = self._base(completion, prompt)
        messages = _common_messages(base.messages, completion.messages) if base else 0
        new, sampled = prompt[shared:], np.ascontiguousarray(completion.sampled_ids, np.int32)
        header = _header(completion, tools)
        header["base"] = base.id if base else None
        header["shared"] = [shared, messages]
        header["messages"] = completion.messages[messages:]
        numbers = [
            np.ascontiguousarray(completion.logprobs, np.float32),
            np.ascontiguousarray(completion.policy_versions, np.int32),
        ]
        self._write(frame(header, [new, sampled, *numbers]))
        whole = (*completion.messages, completion.response)
        written = _Written(completion.id, prompt, sampled, len(prompt) + len(sampled), whole)
        if base is not None and shared == base.length:
            base.inherit(written)
        self._written[completion.id] = written
        self._openings[prompt[:_OPENING].tobytes()] = written

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _base(self, completion: Completion, prompt: Ids) -> tuple[_Written | None, int]:
        """The completion to write this one on top of, and how many tokens they share."""
        base = self._written.get(completion.parent or "") or self._written.get(completion.follows or "")
        base = base or self._openings.get(prompt[:_OPENING].tobytes())
        shared = base.common_prefix(prompt) if base else 0
        return (base, shared) if shared else (None, 0)

    def _append_tools(self, tools: tuple[ToolDefinition, ...]) -> str | None:
        if tools is self._latest_tools[0]:
            return self._latest_tools[1]
        if not tools:
            return None
        digest = hashlib.blake2b(orjson.dumps(tools), digest_size=16).hexdigest()
        if digest not in self._known_tools:
            self._write(frame({"record": "tools", "hash": digest, "tools": tools}))
            self._known_tools.add(digest)
        self._latest_tools = (tools, digest)
        return digest

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError("the disk is full")
        except OSError as error:
            os.ftruncate(self._file, self.length)
            raise CaptureError(
                f"{self.path}: cannot be written: {error.strerror or error}", hint="free some disk space"
            ) from error
        self.length += len(data)


def _common_messages(one: tuple[Message, ...], other: tuple[Message, ...]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left is not right and left != right:
            break
        count += 1
    return count


def _sound_length(data: bytes) -> int:
    """How much of a log to keep when it is opened for appending: all but a torn last record."""
    if data and not data.startswith(MAGIC) and not MAGIC.startswith(data):
        known = "of another version" if data.startswith(FAMILY) else "not a capture"
        raise CaptureError(f"the file to append to is {known}")
    sound = len(MAGIC) if data.startswith(MAGIC) else 0
    return max([sound, *(part.end for part in frames(data) if isinstance(part, Frame))])


def _header(completion: Completion, tools: str | None) -> dict[str, Any]:
    return {
        "record": "completion",
        "id": completion.id,
        "parent": completion.parent,
        "follows": completion.follows,
        "response": completion.response,
        "finish_reason": completion.finish_reason,
        "tools": tools,
        "dialect": completion.dialect,
        "kind": completion.kind,
        "asked": completion.asked,
        "used": completion.used,
        "times": [completion.started_at, completion.first_token_at, completion.ended_at],
        "untrainable": completion.untrainable,
        "extra": completion.extra,
    }
