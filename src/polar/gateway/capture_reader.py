"""Reads a session's log back: every completion that is sound, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polar.errors import PolarError
from polar.gateway.frames import FAMILY, MAGIC, VERSION, Damage, FrameReader, frames
from polar.models.chat import FinishReason, Message, Role, Sampling, ToolCall, ToolDefinition
from polar.models.completion import Completion, CompletionKind, Ids, Logprobs, Versions
from polar.models.session import Fault

LOST_CONTEXT = "its context is lost"
_DTYPES = (np.int32, np.int32, np.float32, np.int32)


class CaptureError(PolarError):
    """A capture cannot be written, or is not one."""


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """What a log holds."""

    completions: tuple[Completion, ...]
    """In the order they were written. One whose context is lost is untrainable and has no prompt ids."""
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """One completion as written: on top of an earlier one, its base."""

    own: Completion
    """With only the prompt ids and messages that it does not share."""
    base: int | None
    """The place of the base among the records; None where it stands alone."""
    shared: int
    shared_messages: int
    tools: str | None
    is_lost: bool
    """What it was written on top of is not there."""

    @property
    def given(self) -> int:
        return self.shared + len(self.own.prompt_ids)

    @property
    def length(self) -> int:
        return self.given + len(self.own.sampled_ids)


def parse_capture(data: bytes, path: Path = Path("capture")) -> Capture:
    """The completions of a log; CaptureError if the bytes are no log at all. `path` only names them."""
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return Capture((), ())
        if data.startswith(FAMILY):
            raise CaptureError(f"{path}: a capture of another version than {VERSION}, which this Polar reads")
        raise CaptureError(f"{path}: not a capture")
    reading = _Reading()
    for frame in frames(data):
        if isinstance(frame, Damage):
            reading.fault(
                None, f"bytes {frame.start} to {frame.end} of its capture are damaged or unfinished"
            )
        else:
            reading.add(frame.payload)
    return Capture(reading.completions(), tuple(reading.faults))


class _Reading:
    """The records of a log while they are read."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._frames = FrameReader()
        self._records: list[_Record] = []
        self._places: dict[str, int] = {}
        self._tools: dict[str, tuple[ToolDefinition, ...]] = {}

    def fault(self, completion: str | None, problem: str) -> None:
        self.faults.append(Fault(completion=completion, problem=problem))

    def add(self, payload: bytes) -> None:
        name: str | None = None
        try:
            header, arrays = self._frames.open(payload, _DTYPES)
            if header["record"] == "tools":
                self._tools[header["hash"]] = tuple(ToolDefinition(**tool) for tool in header["tools"])
                return
            name = header["id"]
            record = self._record(header, _own(header, *arrays))
        except (ValueError, KeyError, TypeError) as error:
            self.fault(name, f"its record cannot be read: {error}")
            return
        if record.own.id in self._places:
            self.fault(name, "it is recorded twice; the first is kept")
            return
        if record.is_lost:
            self.fault(name, f"{LOST_CONTEXT}: it begins in completion {header['base']}")
        self._places[record.own.id] = len(self._records)
        self._records.append(record)

    def _record(self, header: dict[str, Any], own: Completion) -> _Record:
        shared, shared_messages = header["shared"]
        base = self._places.get(header["base"]) if header["base"] is not None else None
        is_lost = header["base"] is not None and (base is None or self._records[base].is_lost)
        if base is not None and not is_lost and not 0 <= shared <= self._records[base].length:
            raise ValueError(f"it shares {shared} of {self._records[base].length} tokens")
        return _Record(own, base, shared, shared_messages, header["tools"], is_lost)

    def completions(self) -> tuple[Completion, ...]:
        made: list[Completion] = []
        for record, context in zip(self._records, _contexts(self._records), strict=True):
            own = record.own
            if record.tools is not None and record.tools not in self._tools:
                self.fault(own.id, "the tools it was offered are lost")
            base = made[record.base] if record.base is not None else None
            shared = (*base.messages, base.response)[: record.shared_messages] if base else ()
            completion = replace(
                own,
                index=len(made),
                messages=(*shared, *own.messages),
                tools=self._tools.get(record.tools or "", ()),
                prompt_ids=context[: record.given],
                sampled_ids=own.sampled_ids if record.is_lost else context[record.given : record.length],
            )
            if record.is_lost and own.untrainable is None:
                completion = replace(completion, untrainable=LOST_CONTEXT)
            made.append(completion)
        return tuple(made)


def _contexts(records: Sequence[_Record]) -> list[Ids]:
    """The full context of each record; those that extend each other are views of one array.

    So a session takes memory, and time, for what each record adds; and whoever finds two contexts to
    begin at the same address need not compare them.
    """
    heirs: dict[int, int] = {}
    for place, record in enumerate(records):
        if record.base is not None and not record.is_lost and record.shared == records[record.base].length:
            heirs.setdefault(record.base, place)
    reach = [record.length for record in records]
    for place in range(len(records) - 1, -1, -1):
        if place in heirs:
            reach[place] = reach[heirs[place]]
    buffers: list[Ids] = []
    for place, record in enumerate(records):
        if record.is_lost:
            buffers.append(np.empty(0, np.int32))
            continue
        if record.base is not None and heirs.get(record.base) == place:
            buffer = buffers[record.base]
        else:
            buffer = np.empty(reach[place], np.int32)
            if record.base is not None:
                buffer[: record.shared] = buffers[record.base][: record.shared]
        buffer[record.shared : record.given] = record.own.prompt_ids
        buffer[record.given : record.length] = record.own.sampled_ids
        buffers.append(buffer)
    for buffer in buffers:
        buffer.flags.writeable = False
    return [buffer[: record.length] for buffer, record in zip(buffers, records, strict=True)]


def _own(
    header: dict[str, Any], new: Ids, sampled: Ids, logprobs: Logprobs, versions: Versions
) -> Completion:
    started_at, first_token_at, ended_at = header["times"]
    return Completion(
        id=header["id"],
        index=0,
        prompt_ids=new,
        sampled_ids=sampled,
        logprobs=logprobs,
        policy_versions=versions,
        messages=tuple(map(_message, header["messages"])),
        response=_message(header["response"]),
        finish_reason=FinishReason(header["finish_reason"]),
        parent=header["parent"],
        follows=header["follows"],
        dialect=header["dialect"],
        kind=CompletionKind(header["kind"]),
        asked=_sampling(header["asked"]),
        used=_sampling(header["used"]),
        started_at=started_at,
        first_token_at=first_token_at,
        ended_at=ended_at,
        untrainable=header["untrainable"],
        extra=header["extra"],
    )


def _message(fields: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in fields["tool_calls"])
    return Message(**fields | {"role": Role(fields["role"]), "tool_calls": calls})


def _sampling(fields: dict[str, Any]) -> Sampling:
    bias = tuple((token, value) for token, value in fields.get("logit_bias", ()))
    return Sampling(**fields | {"stop": tuple(fields["stop"]), "logit_bias": bias})
