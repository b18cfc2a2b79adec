"""A session's recording: its result, its token tree, and which segments each trace trains, in one file.

The first line names the format. The second is the head, which is readable by itself: its checksum, and as
JSON the session's result and the body's checksum. The body is compressed: a record of the traces, then those
of the completions, as a capture has them. No flipped bit goes unnoticed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard
from pydantic import ValidationError

from polar.errors import InvalidInput, PolarError
from polar.models.completion import Completion
from polar.models.session import SessionResult
from polar.models.trace import DriftPolicy, Lineage, TraceRef, Trajectory
from polar.recordings.codec import Record, TreeReader, TreeWriter, message_base, packed, unpacked
from polar.recordings.tree import TokenTree

VERSION = 5
FAMILY = b"polar-recording-"
MAGIC = FAMILY + b"%d\n" % VERSION


class DamagedRecording(PolarError):
    """The bytes are not a whole recording."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Everything kept of a session's model calls."""

    tree: TokenTree
    trajectory: Trajectory
    """Its stats list the unsound parts of the capture; all others are included."""
    result: SessionResult

    @property
    def completions(self) -> tuple[Completion, ...]:
        return self.tree.completions


def encode(tree: TokenTree, trajectory: Trajectory, result: SessionResult) -> bytes:
    """Encode a session's file."""
    writer = TreeWriter()
    records = [Record({"drift": trajectory.drift, "traces": trajectory.traces})]
    for completion, link in zip(tree.completions, tree.links, strict=True):
        base = message_base(link)
        before = None if base is None else tree.completions[base]
        known = () if before is None else (*before.messages, before.response)
        records += writer.records(completion, link, known)
    body = zstandard.compress(packed(records), level=3)
    head = orjson.dumps({"result": result.model_dump(mode="json"), "body": _checksum(body).decode()})
    return MAGIC + _checksum(head) + b" " + head + b"\n" + body


def decode(data: bytes) -> Recording:
    """Decode a recording; raise DamagedRecording if it was changed."""
    end = data.find(b"\n", len(MAGIC)) + 1 or len(data)
    result, checksum = _opened_head(data[:end])
    if _checksum(body := data[end:]) != checksum:
        raise _damaged("its checksum does not match")
    try:
        return _opened_body(zstandard.decompress(body), result)
    except (zstandard.ZstdError, struct.error, KeyError, TypeError, ValueError, IndexError) as error:
        raise _damaged(str(error)) from None


def read_head(file: BinaryIO | Path) -> SessionResult:
    """Read the session's result from the beginning of the file, without tokens."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return read_head(opened)
    return _opened_head(file.readline(len(MAGIC)) + file.readline())[0]


def is_recording(path: Path) -> bool:
    """Whether a file begins like a recording of any version."""
    try:
        with path.open("rb") as file:
            return file.read(len(FAMILY)) == FAMILY
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None


def _opened_head(data: bytes) -> tuple[SessionResult, bytes]:
    """The session's result, and the checksum of the body."""
    if not data.startswith(MAGIC):
        if data.startswith(FAMILY):
            raise DamagedRecording(
                f"a recording of another version than {VERSION}", hint="read it with the Polar that wrote it"
            )
        raise DamagedRecording("not a Polar recording")
    checksum, _, head = data[len(MAGIC) :].partition(b" ")
    if not head.endswith(b"\n") or _checksum(head[:-1]) != checksum:
        raise _damaged("the checksum of its head does not match")
    try:
        fields = orjson.loads(head)
        return SessionResult.model_validate(fields["result"]), fields["body"].encode()
    except (ValidationError, KeyError) as error:
        raise _damaged(str(error)) from None


def _opened_body(body: bytes, result: SessionResult) -> Recording:
    (document, _), *records = unpacked(body)
    reader = TreeReader()
    for record in records:
        reader.add(record)
    if reader.faults:
        raise ValueError(reader.faults[0].problem)
    tree, drift = reader.tree(), DriftPolicy(document["drift"])
    traces = tuple(map(_trace, document["traces"]))
    return Recording(tree, Trajectory(tree.forest(drift).segments, traces, result.stats, drift), result)


def _trace(record: dict[str, Any]) -> TraceRef:
    return TraceRef(
        tuple(record["trained"]),
        record["reward"],
        record["share"],
        Lineage(record["lineage"]),
        record["parent"],
    )


def _damaged(problem: str) -> DamagedRecording:
    return DamagedRecording(f"the recording is damaged: {problem}", hint="restore it from a backup")


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()
