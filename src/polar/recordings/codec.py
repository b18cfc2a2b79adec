"""Completions and their links as JSON and arrays, in the form that captures and recordings share.

A completion is written as what it adds: the tokens of its own two segments, and the messages that the
completion before it does not hold.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from polar.models.chat import FinishReason, Message, Role, Sampling, ToolCall, ToolDefinition
from polar.models.completion import Completion, Ids, Logprobs, Routing, Versions
from polar.models.session import Fault
from polar.recordings.growth import Context, extended
from polar.recordings.tree import Continuation, Link, TokenTree

LOST_CONTEXT = "its context is lost"
_ROLES = {role.value: role for role in Role}
_REASONS = {reason.value: reason for reason in FinishReason}
_CONTINUATIONS = {kind.value: kind for kind in Continuation}
_NO_IDS: Ids = np.empty(0, np.int32)
_LENGTH = struct.Struct("<I")

Array = np.ndarray[Any, np.dtype[Any]]


class Columns(NamedTuple):
    """The numbers of a completion, or of several one after another."""

    given: Ids
    """What its prompt adds."""
    sampled: Ids
    logprobs: Logprobs
    versions: Versions
    routing: Routing | None = None
    """Of the last tokens but one, at most as many as it adds: its own last token is computed by whoever
    follows it, and the last of the completion before it by this one. Where the first who asked the same
    prompt told none, those of the prompt stand before."""


_PLAIN = (
    *("id", "follows", "response", "finish_reason", "dialect", "asked", "used"),
    *("started_at", "first_token_at", "ended_at", "untrainable", "extra"),
)
"""The fields of a completion that are written as they are."""
_DTYPES = (np.int32, np.int32, np.float32, np.int32)


def columns(completion: Completion, link: Link, lacking: int = 0) -> Columns:
    """`lacking`: how many tokens the completion with the same prompt was given and told no experts of."""
    routing, added = completion.routing, link.given + len(completion.sampled_ids) + max(lacking - 1, 0)
    return Columns(
        np.ascontiguousarray(completion.prompt_ids[len(completion.prompt_ids) - link.given :], np.int32),
        np.ascontiguousarray(completion.sampled_ids, np.int32),
        np.ascontiguousarray(completion.logprobs, np.float32),
        np.ascontiguousarray(completion.policy_versions, np.int32),
        None if routing is None else routing[max(len(routing) - added, 0) :],
    )


def header(
    completion: Completion,
    link: Link,
    names: Sequence[str],
    known: Sequence[Message],
    tools: str | int | None,
) -> dict[str, Any]:
    """All of a completion that is no array.

    `names` are the ids of the completions before it, `known` what was said up to the one it continues.
    """
    shared = _common(known, completion.messages)
    return {name: getattr(completion, name) for name in _PLAIN} | {
        "after": None if link.after is None else names[link.after],
        "past_answer": link.past_answer,
        "continues": None if link.continues is None else names[link.continues],
        "continuation": link.kind,
        "resumes": link.resumes,
        "shared_messages": shared,
        "messages": completion.messages[shared:],
        "tools": tools,
    }


def message_base(link: Link) -> int | None:
    """The completion whose messages a completion's own begin with."""
    return link.twin if link.continues is None else link.continues


class TreeReader:
    """Puts a tree together again from the records of its completions, in their order."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.tools: dict[str | int, tuple[ToolDefinition, ...]] = {}
        self.samplings: list[Sampling] = []
        """Those that records name by number."""
        self._places: dict[str, int] = {}
        self._read: list[_Read] = []

    def fault(self, completion: str | None, problem: str) -> None:
        self.faults.append(Fault(completion=completion, problem=problem))

    def add(self, record: dict[str, Any], numbers: Columns) -> None:
        """Take the next completion; ValueError, KeyError or TypeError if the record makes no sense."""
        name = record["id"]
        if name in self._places:
            self.fault(name, "it is recorded twice; the first is kept")
            return
        plain = {field: record[field] for field in _PLAIN}
        plain["response"] = _message(record["response"])
        plain["finish_reason"] = _REASONS[record["finish_reason"]]
        plain["asked"], plain["used"] = self._sampling(record["asked"]), self._sampling(record["used"])
        link, missing = self._link(record, len(numbers.given))
        read = _Read(plain, record["tools"], numbers, link, self._messages(record, link))
        if missing is None:
            self._set_context(read)
        else:
            self.fault(name, f"{LOST_CONTEXT}: it begins in completion {missing}")
            plain["untrainable"] = LOST_CONTEXT if plain["untrainable"] is None else plain["untrainable"]
        self._places[name] = len(self._read)
        self._read.append(read)

    def tree(self) -> TokenTree:
        completions = tuple(map(self._completion, range(len(self._read))))
        return TokenTree(completions, tuple(read.link for read in self._read), tuple(self.faults))

    def _link(self, record: dict[str, Any], given: int) -> tuple[Link, str | None]:
        """The link of a record, and the completion that it hangs on and that is lost."""
        places: list[int | None] = []
        for name in (record["after"], record["continues"]):
            place = self._places.get(name) if name is not None else None
            if name is not None and (place is None or self._read[place].context is None):
                return Link(), name
            places.append(place)
        after, continues = places
        kind = _CONTINUATIONS[record["continuation"]] if continues is not None else None
        return Link(after, record["past_answer"], given, continues, kind, record["resumes"]), None

    def _messages(self, record: dict[str, Any], link: Link) -> tuple[Message, ...]:
        own = tuple(map(_message, record["messages"]))
        base, count = message_base(link), record["shared_messages"]
        if base is None or not count:
            return own
        before = self._read[base]
        if count == len(before.messages) + 1:
            return before.messages + (before.plain["response"], *own)  # noqa: RUF005 (one copy, not three)
        if count > len(before.messages):
            raise ValueError(f"it shares {count} of {len(before.messages) + 1} messages")
        return before.messages[:count] + own

    def _sampling(self, fields: dict[str, Any] | int) -> Sampling:
        return self.samplings[fields] if isinstance(fields, int) else sampling_of(fields)

    def _set_context(self, read: _Read) -> None:
        link, given = read.link, read.numbers.given
        before = self._read[link.after] if link.after is not None else None
        if before is None or before.context is None:
            read.context, read.length = Context().extended(0, given), len(given)
            return
        sampled = before.numbers.sampled
        read.context = extended(before.context, before.length, sampled, given, link)
        read.length = before.length + len(given) + (len(sampled) if link.past_answer else 0)

    def _completion(self, place: int) -> Completion:
        read = self._read[place]
        numbers, link, tools = read.numbers, read.link, read.tools
        if tools is not None and tools not in self.tools:
            self.fault(read.plain["id"], "the tools it was offered are lost")
        parent = link.continues if link.kind is Continuation.CLEAN else None
        return Completion(
            **read.plain,
            index=place,
            prompt_ids=_NO_IDS if read.context is None else read.context.first(read.length),
            sampled_ids=numbers.sampled,
            logprobs=numbers.logprobs,
            policy_versions=numbers.versions,
            routing=None if numbers.routing is None or not len(numbers.routing) else numbers.routing,
            messages=read.messages,
            parent=None if parent is None else self._read[parent].plain["id"],
            tools=() if tools is None else self.tools.get(tools, ()),
        )


@dataclass(slots=True, eq=False)
class _Read:
    """A completion that was read, until its context has stopped growing."""

    plain: dict[str, Any]
    tools: str | int | None
    numbers: Columns
    link: Link
    messages: tuple[Message, ...]
    context: Context | None = None
    """Holds its prompt; None: it is lost."""
    length: int = 0
    """Of its prompt."""


def _message(fields: dict[str, Any]) -> Message:
    fields["role"] = _ROLES[fields["role"]]
    fields["tool_calls"] = tuple(ToolCall(**call) for call in fields["tool_calls"])
    return Message(**fields)


def sampling_of(fields: dict[str, Any]) -> Sampling:
    fields["stop"] = tuple(fields["stop"])
    fields["logit_bias"] = tuple(map(tuple, fields["logit_bias"]))
    return Sampling(**fields)


def _common(one: Sequence[Message], other: Sequence[Message]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left is not right and left != right:
            break
        count += 1
    return count


def packed(document: dict[str, Any], arrays: Sequence[Array] = (), routing: Routing | None = None) -> bytes:
    """A JSON document, arrays of four-byte numbers, and the experts of tokens where there are any, to be
    compressed.

    Arrays lie byte plane by byte plane: the high bytes of token ids are mostly zero and those of logprobs
    alike, which a compressor only sees when they stand together.
    """
    document = document | {"lengths": [len(array) for array in arrays]}
    planes = [array.view(np.uint8).reshape(-1, 4).T.tobytes() for array in arrays]
    if routing is not None:
        # Little-endian, whoever writes it.
        document["routing"] = {"shape": routing.shape, "bytes": routing.itemsize}
        planes.append(routing.astype(f"<u{routing.itemsize}", copy=False).tobytes())
    text = orjson.dumps(document)
    return b"".join([_LENGTH.pack(len(text)), text, *planes])


def unpacked(data: bytes) -> tuple[dict[str, Any], list[Array]]:
    """What `packed` was given; ValueError, KeyError, TypeError or struct.error if it made no such thing."""
    (length,) = _LENGTH.unpack_from(data)
    offset = _LENGTH.size + length
    document = orjson.loads(memoryview(data)[_LENGTH.size : offset])
    arrays: list[Array] = []
    for count, dtype in zip(document["lengths"], _DTYPES, strict=False):
        low, *higher = np.frombuffer(data, np.uint8, 4 * count, offset).reshape(4, count)
        numbers = low.astype("<u4")
        for place, plane in enumerate(higher, 1):
            numbers |= plane.astype("<u4") << np.uint32(8 * place)
        numbers.flags.writeable = False
        arrays.append(numbers.view(dtype))
        offset += 4 * count
    if (told := document.get("routing")) is not None:
        shape, size = told["shape"], told["bytes"]
        routing = np.frombuffer(data, f"<u{size}", math.prod(shape), offset)
        arrays.append(routing.reshape(shape))
        offset += routing.nbytes
    if offset != len(data):
        raise ValueError(f"its arrays end at byte {offset} of {len(data)}")
    return document, arrays
