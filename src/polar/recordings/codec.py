"""Completions and their links as records of JSON and arrays, which captures and recordings share.

A completion is written as what it adds: the tokens of its own two segments, and the messages that the
completion before it does not hold.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import orjson

from polar.models.chat import FinishReason, Message, Role, Sampling, ToolCall, ToolDefinition
from polar.models.completion import NO_IDS, Completion, Ids, Logprobs, Routing, Versions
from polar.models.session import Fault
from polar.recordings.growth import Context, extended
from polar.recordings.tree import Continuation, Link, TokenTree, lacking_experts

LOST_CONTEXT = "its context is lost"
_ROLES = {role.value: role for role in Role}
_REASONS = {reason.value: reason for reason in FinishReason}
_CONTINUATIONS = {kind.value: kind for kind in Continuation}
_LENGTH = struct.Struct("<I")

Array = np.ndarray[Any, np.dtype[Any]]


class Columns(NamedTuple):
    """The numbers of a completion."""

    given: Ids = NO_IDS
    """Ids that its prompt adds."""
    sampled: Ids = NO_IDS
    logprobs: Logprobs = NO_IDS.view(np.float32)
    versions: Versions = NO_IDS
    routing: Routing | None = None
    """Experts of its tokens except the last, at most as many as it adds: its own last token is computed by
    its successor, and its predecessor's by this one. The prompt's come first if the first request of the same
    prompt reported none."""


class Record(NamedTuple):
    """A completion as a delta, or the tools offered to completions, which have no numbers."""

    document: dict[str, Any]
    numbers: Columns = Columns()


_PLAIN = (
    *("id", "follows", "response", "finish_reason", "dialect", "asked", "used"),
    *("started_at", "first_token_at", "ended_at", "untrainable", "extra"),
)
"""Fields of a completion that are stored unchanged."""


class TreeWriter:
    """Writes the completions of a tree as records, in their order."""

    def __init__(self) -> None:
        self._names: list[str] = []
        """Names of the written completions."""
        self._lacking: list[int] = []
        """Number of prompt tokens without experts, by completion."""
        self._known_tools: set[str] = set()
        self._latest_tools: tuple[tuple[ToolDefinition, ...], str | None] = ((), None)

    def records(self, completion: Completion, link: Link, known: Sequence[Message]) -> Iterator[Record]:
        """Yield the record of a completion, after one of its tools if they are new.

        `known` is the conversation up to its predecessor (`message_base`). A record counts as written once
        the next is requested, so one that a full disk refused is never referenced.
        """
        tools = self._digest(completion.tools)
        if tools is not None and tools not in self._known_tools:
            yield Record({"record": "tools", "hash": tools, "tools": completion.tools})
            self._known_tools.add(tools)
        yield self._record(completion, link, known, tools)
        self._names.append(completion.id)
        self._lacking.append(lacking_experts(completion, link))

    def _digest(self, tools: tuple[ToolDefinition, ...]) -> str | None:
        if tools is not self._latest_tools[0]:
            digest = hashlib.blake2b(orjson.dumps(tools), digest_size=16).hexdigest() if tools else None
            self._latest_tools = tools, digest
        return self._latest_tools[1]

    def _record(
        self, completion: Completion, link: Link, known: Sequence[Message], tools: str | None
    ) -> Record:
        shared = _common(known, completion.messages)
        document = {name: getattr(completion, name) for name in _PLAIN} | {
            "record": "completion",
            "after": None if link.after is None else self._names[link.after],
            "past_answer": link.past_answer,
            "continues": None if link.continues is None else self._names[link.continues],
            "continuation": link.kind,
            "resumes": link.resumes,
            "shared_messages": shared,
            "messages": completion.messages[shared:],
            "tools": tools,
        }
        lacking = 0 if link.twin is None else self._lacking[link.twin]
        routing, added = completion.routing, link.given + len(completion.sampled_ids) + max(lacking - 1, 0)
        numbers = Columns(
            np.ascontiguousarray(completion.prompt_ids[len(completion.prompt_ids) - link.given :], np.int32),
            np.ascontiguousarray(completion.sampled_ids, np.int32),
            np.ascontiguousarray(completion.logprobs, np.float32),
            np.ascontiguousarray(completion.policy_versions, np.int32),
            None if routing is None else routing[max(len(routing) - added, 0) :],
        )
        return Record(document, numbers)


def message_base(link: Link) -> int | None:
    """The completion whose messages this one's begin with."""
    return link.twin if link.continues is None else link.continues


class TreeReader:
    """Restores a tree from the records of its completions, in their order."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._tools: dict[str, tuple[ToolDefinition, ...]] = {}
        self._places: dict[str, int] = {}
        self._read: list[_Read] = []
        self._asked: tuple[dict[str, Any], Sampling] = ({}, Sampling())
        """The last sampling parameters, encoded and decoded: most requests of a session repeat them."""

    def fault(self, completion: str | None, problem: str) -> None:
        self.faults.append(Fault(completion=completion, problem=problem))

    def add(self, taken: Record) -> None:
        """Add the next record; raise ValueError, KeyError or TypeError if it is invalid."""
        record, numbers = taken
        if record["record"] == "tools":
            self._tools[record["hash"]] = tuple(ToolDefinition(**tool) for tool in record["tools"])
            return
        name = record["id"]
        if name in self._places:
            self.fault(name, "it is recorded twice; the first is kept")
            return
        plain = {field: record[field] for field in _PLAIN}
        plain["response"] = _message(record["response"])
        plain["finish_reason"] = _REASONS[record["finish_reason"]]
        plain["used"] = _sampling(record["used"])
        if record["asked"] != self._asked[0]:
            self._asked = record["asked"], _sampling(dict(record["asked"]))
        plain["asked"] = self._asked[1]
        link, missing = self._link(record, len(numbers.given))
        read = _Read(plain, record["tools"], numbers, link, self._messages(record, link))
        if missing is None:
            self._set_context(read)
        else:
            self.fault(name, f"{LOST_CONTEXT}: it begins in completion {missing}")
            plain["untrainable"] = LOST_CONTEXT if plain["untrainable"] is None else plain["untrainable"]
        self._places[name] = len(self._read)
        self._read.append(read)

    def __len__(self) -> int:
        """How many completions have been read."""
        return len(self._read)

    def at(self, place: int) -> tuple[Completion, Link]:
        """One of the completions that have been read, with its link."""
        return self._completion(place), self._read[place].link

    def tree(self) -> TokenTree:
        completions = tuple(map(self._completion, range(len(self._read))))
        return TokenTree(completions, tuple(read.link for read in self._read), tuple(self.faults))

    def _link(self, record: dict[str, Any], given: int) -> tuple[Link, str | None]:
        """The link of a record, and its lost predecessor if there is one."""
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
        if tools is not None and tools not in self._tools:
            self.fault(read.plain["id"], "the tools it was offered are lost")
        parent = link.continues if link.kind is Continuation.CLEAN else None
        return Completion(
            **read.plain,
            index=place,
            prompt_ids=NO_IDS if read.context is None else read.context.first(read.length),
            sampled_ids=numbers.sampled,
            logprobs=numbers.logprobs,
            policy_versions=numbers.versions,
            routing=None if numbers.routing is None or not len(numbers.routing) else numbers.routing,
            messages=read.messages,
            parent=None if parent is None else self._read[parent].plain["id"],
            tools=() if tools is None else self._tools.get(tools, ()),
        )


@dataclass(slots=True, eq=False)
class _Read:
    """A decoded completion, until its context stops growing."""

    plain: dict[str, Any]
    tools: str | None
    numbers: Columns
    link: Link
    messages: tuple[Message, ...]
    context: Context | None = None
    """Context of its prompt; None if lost."""
    length: int = 0
    """Length of its prompt."""


def _message(fields: dict[str, Any]) -> Message:
    fields["role"] = _ROLES[fields["role"]]
    calls = fields["tool_calls"]
    fields["tool_calls"] = tuple([ToolCall(**call) for call in calls]) if len(calls) else ()
    return Message(**fields)


def _sampling(fields: dict[str, Any]) -> Sampling:
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


def packed(records: Sequence[Record]) -> bytes:
    """Encode records for compression: documents as JSON, then numbers, then experts.

    Numbers are stored by column and byte plane: the high bytes of token ids are mostly zero and those of
    logprobs similar, which a compressor only sees when they are adjacent.
    """
    documents: list[dict[str, Any]] = []
    experts: list[bytes] = []
    for document, (*numbers, routing) in records:
        document = document | {"lengths": [len(array) for array in numbers]}
        if routing is not None:
            # Little-endian on every machine.
            document["routing"] = {"shape": routing.shape, "bytes": routing.itemsize}
            experts.append(routing.astype(f"<u{routing.itemsize}", copy=False).tobytes())
        documents.append(document)
    text = orjson.dumps(documents)
    *columns, _ = zip(*(record.numbers for record in records), strict=True)
    whole = np.concatenate([array.view(np.uint8) for column in columns for array in column])
    return b"".join([_LENGTH.pack(len(text)), text, whole.reshape(-1, 4).T.tobytes(), *experts])


def unpacked(data: bytes) -> Iterator[Record]:
    """Decode the output of `packed`; raise ValueError, KeyError, TypeError or struct.error if it is not
    one."""
    (length,) = _LENGTH.unpack_from(data)
    offset = _LENGTH.size + length
    documents = orjson.loads(memoryview(data)[_LENGTH.size : offset])
    columns = zip(*(document["lengths"] for document in documents), strict=True)
    lengths = [length for column in columns for length in column]
    planes = np.frombuffer(data, np.uint8, 4 * sum(lengths), offset).reshape(4, -1)
    joined = np.empty((planes.shape[1], 4), np.uint8)
    for byte, plane in enumerate(planes):
        joined[:, byte] = plane  # a third of the time of a transposed copy
    whole = joined.reshape(-1).view(np.int32)
    whole.flags.writeable = False
    pieces = [whole[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
    offset += planes.nbytes
    for place, document in enumerate(documents):
        given, sampled, logprobs, versions = pieces[place :: len(documents)]
        routing: Routing | None = None
        if (told := document.get("routing")) is not None:
            flat = np.frombuffer(data, f"<u{told['bytes']}", math.prod(told["shape"]), offset)
            routing, offset = flat.reshape(told["shape"]), offset + flat.nbytes
        yield Record(document, Columns(given, sampled, logprobs.view(np.float32), versions, routing))
    if offset != len(data):
        raise ValueError(f"its arrays end at byte {offset} of {len(data)}")
