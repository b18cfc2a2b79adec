"""A session's recording as one blob: its capture, and which completions each trace trains.

The capture already holds every token and message once. Traces are kept as the completions they
train, so the segments are grown again on reading and no token is written twice.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import orjson
import zstandard

from polar.errors import PolarError
from polar.gateway.capture import parse_capture
from polar.models.completion import Completion
from polar.models.session import SessionResult
from polar.models.trace import TraceRef, Trajectory
from polar.trajectory.forest import grow

MAGIC = b"polar-recording-1\n"
_LENGTH = struct.Struct("<I")


class DamagedRecording(PolarError):
    """The bytes are not a whole recording."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Everything kept of a session's model calls."""

    completions: tuple[Completion, ...]
    trajectory: Trajectory
    result: SessionResult


def encode(capture: bytes, trajectory: Trajectory, result: SessionResult) -> bytes:
    """The blob of a session whose capture log is `capture`."""
    closing = orjson.dumps(
        {
            "result": result.model_dump(mode="json"),
            "traces": [
                {
                    "completions": [trajectory.segments[index].completion_id for index in ref.trained],
                    "reward": ref.reward,
                }
                for ref in trajectory.traces
            ],
        }
    )
    body = _LENGTH.pack(len(closing)) + closing + capture
    return MAGIC + zstandard.ZstdCompressor(level=9).compress(body)


def decode(data: bytes) -> Recording:
    """The recording that `encode` made."""
    closing, capture = _open(data)
    completions = tuple(parse_capture(capture))
    forest = grow(completions)
    result = SessionResult.model_validate(closing["result"])
    try:
        traces = tuple(
            TraceRef(tuple(forest.sampled[name] for name in trace["completions"]), trace["reward"])
            for trace in closing["traces"]
        )
    except KeyError as error:
        raise DamagedRecording(f"a trace names completion {error}, which the capture lacks") from None
    return Recording(completions, Trajectory(forest.segments, traces, result.stats), result)


def _open(data: bytes) -> tuple[dict[str, Any], bytes]:
    if not data.startswith(MAGIC):
        raise DamagedRecording("not a Polar recording")
    try:
        body = zstandard.ZstdDecompressor().decompress(data[len(MAGIC) :])
        (length,) = _LENGTH.unpack_from(body)
        start = _LENGTH.size
        return orjson.loads(body[start : start + length]), body[start + length :]
    except (zstandard.ZstdError, struct.error, orjson.JSONDecodeError) as error:
        raise DamagedRecording(f"the recording is damaged: {error}") from None
