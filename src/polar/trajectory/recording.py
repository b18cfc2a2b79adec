"""A session's recording as one blob: its capture, and which completions each trace trains.

The capture already holds every token and message once. Traces are kept as the completions they
train, so the segments are grown again on reading and no token is written twice.

A blob is MAGIC, the checksum of all that follows it, and the compressed body: no flipped bit goes unnoticed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import orjson
import zstandard

from polar.errors import PolarError
from polar.gateway.capture import CaptureError, parse_capture
from polar.models.completion import Completion
from polar.models.session import SessionResult
from polar.models.trace import DriftPolicy, Lineage, TraceRef, Trajectory
from polar.trajectory.forest import Forest, grow

VERSION = 3
FAMILY = b"polar-recording-"
MAGIC = FAMILY + b"%d\n" % VERSION
_CHECKSUM_SIZE = 16
_LENGTH = struct.Struct("<I")


class DamagedRecording(PolarError):
    """The bytes are not a whole recording."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Everything kept of a session's model calls."""

    completions: tuple[Completion, ...]
    trajectory: Trajectory
    """Of what was not sound in the capture its stats tell the faults; what was sound is all there."""
    result: SessionResult


def encode(capture: bytes, trajectory: Trajectory, result: SessionResult) -> bytes:
    """The blob of a session whose capture log is `capture`."""
    closing = orjson.dumps(
        {
            "result": result.model_dump(mode="json"),
            "drift": trajectory.drift,
            "traces": [_trace_record(trajectory, ref) for ref in trajectory.traces],
        }
    )
    body = zstandard.ZstdCompressor(level=3).compress(_LENGTH.pack(len(closing)) + closing + capture)
    return MAGIC + _checksum(body) + body


def decode(data: bytes) -> Recording:
    """The recording that `encode` made."""
    closing, data = _open(data)
    try:
        capture = parse_capture(data)
        result = SessionResult.model_validate(closing["result"])
        drift = DriftPolicy(closing["drift"])
        forest = grow(capture.completions, drift)
        traces = tuple(_trace(record, forest) for record in closing["traces"])
    except KeyError as error:
        raise DamagedRecording(f"the recording lacks {error}") from None
    except (CaptureError, TypeError, ValueError) as error:
        raise DamagedRecording(f"the recording is damaged: {error}") from None
    return Recording(capture.completions, Trajectory(forest.segments, traces, result.stats, drift), result)


def _trace_record(trajectory: Trajectory, ref: TraceRef) -> dict[str, Any]:
    return {
        "completions": [trajectory.segments[index].completion_id for index in ref.trained],
        "reward": ref.reward,
        "share": ref.share,
        "lineage": ref.lineage,
        "parent": ref.parent,
    }


def _trace(record: dict[str, Any], forest: Forest) -> TraceRef:
    return TraceRef(
        tuple(forest.sampled[name] for name in record["completions"]),
        record["reward"],
        record["share"],
        Lineage(record["lineage"]),
        record["parent"],
    )


def _open(data: bytes) -> tuple[dict[str, Any], bytes]:
    if not data.startswith(MAGIC):
        if data.startswith(FAMILY):
            raise DamagedRecording(
                f"a recording of another version than {VERSION}", hint="read it with the Polar that wrote it"
            )
        raise DamagedRecording("not a Polar recording")
    start = len(MAGIC) + _CHECKSUM_SIZE
    if _checksum(packed := data[start:]) != data[len(MAGIC) : start]:
        raise DamagedRecording(
            "the recording is damaged: its checksum does not match", hint="restore it from a back-up"
        )
    try:
        body = zstandard.ZstdDecompressor().decompress(packed)
        (length,) = _LENGTH.unpack_from(body)
        start = _LENGTH.size
        return orjson.loads(body[start : start + length]), body[start + length :]
    except (zstandard.ZstdError, struct.error, orjson.JSONDecodeError) as error:
        raise DamagedRecording(f"the recording is damaged: {error}") from None


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_SIZE).digest()
