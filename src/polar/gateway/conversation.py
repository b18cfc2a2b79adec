"""Finds the conversation a request extends, and the exact tokens the policy saw and sampled in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.models.completion import Ids

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One completion as its continuations need it; the tokens before it are its parent's."""

    completion_id: str
    parent: Turn | None
    new_prompt_ids: Ids
    sampled_ids: Ids
    messages: tuple[Message, ...]
    """The whole conversation up to and including the sampled message."""

    def prompt_ids(self) -> Ids:
        """Every token the policy conditioned on."""
        return np.concatenate([*(self.parent._pieces() if self.parent else ()), self.new_prompt_ids])

    def _pieces(self) -> list[Ids]:
        pieces: list[Ids] = []
        turn: Turn | None = self
        while turn is not None:
            pieces += [turn.sampled_ids, turn.new_prompt_ids]
            turn = turn.parent
        return pieces[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """How a request continues what was sampled before."""

    turn: Turn | None
    """None: the request begins a conversation."""
    new_messages: tuple[Message, ...]


class Conversations:
    """The conversations of one session, found by a rolling hash over canonical messages.

    Seeded with the tools, advanced by each message. Only hashes that end with a message the policy
    sampled are kept, so the longest match is the latest sampled turn the request still contains.
    """

    def __init__(self) -> None:
        self._turns: dict[bytes, Turn] = {}
        self._by_id: dict[str, Turn] = {}

    def find(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Extension:
        found: Turn | None = None
        matched = 0
        state = _seed(tools)
        for count, message in enumerate(messages, start=1):
            state = _advance(state, message)
            turn = self._turns.get(state) if message.role is Role.ASSISTANT else None
            if turn is not None:
                found, matched = turn, count
        return Extension(found, tuple(messages[matched:]))

    def add(self, turn: Turn, tools: Sequence[ToolDefinition]) -> None:
        """Remember a finished completion; the latest of equal ones is the one that is continued."""
        state = _seed(tools)
        for message in turn.messages:
            state = _advance(state, message)
        self._turns[state] = turn
        self._by_id[turn.completion_id] = turn

    def turn(self, completion_id: str) -> Turn | None:
        """A finished completion of this session by its id."""
        return self._by_id.get(completion_id)


def _seed(tools: Sequence[ToolDefinition]) -> bytes:
    text = orjson.dumps([asdict(tool) for tool in tools], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()


def _advance(state: bytes, message: Message) -> bytes:
    digest = hashlib.blake2b(state, digest_size=_DIGEST_BYTES)
    digest.update(orjson.dumps(_canonical(message)))
    return digest.digest()


def _canonical(message: Message) -> list[Any]:
    """What makes two messages the same to the policy, however a harness re-serialised them.

    Not: ids of tool calls (made up), reasoning (many harnesses drop it), spacing around an
    assistant's text (some trim it). What others wrote counts to the last byte: it was rendered.
    """
    content = message.content.strip() if message.role is Role.ASSISTANT else message.content
    return [message.role, content, [_canonical_call(call) for call in message.tool_calls]]


def _canonical_call(call: ToolCall) -> list[str]:
    try:
        arguments = json.dumps(
            _plain_numbers(json.loads(call.arguments)), sort_keys=True, separators=(",", ":")
        )
    except (ValueError, RecursionError):
        arguments = call.arguments
    return [call.name, arguments]


def _plain_numbers(value: Any) -> Any:
    """JavaScript writes 1.0 as 1."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_plain_numbers(item) for item in value]
        case dict():
            return {key: _plain_numbers(item) for key, item in value.items()}
        case _:
            return value
