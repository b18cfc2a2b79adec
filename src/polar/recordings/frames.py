"""Records in an append-only file: each checked and compressed by itself, so that damage stays where it is.

A file begins with MAGIC; then come frames: length and CRC-32 of the payload (two little-endian u32), the
payload, which is a compressed document with arrays.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import zstandard

VERSION = 3
FAMILY = b"polar-capture-"
MAGIC = FAMILY + b"%d\n" % VERSION
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_COMMON_WORDS = zstandard.ZstdCompressionDict(
    b'{"record":"tools","hash":"","tools":[{"name":"","description":"","parameters":{"type":"object",'
    b'"properties":{"required":[{"record":"completion","id":"","follows":"","response":{"role":"assistant",'
    b'"content":"","reasoning":null,"tool_calls":[{"id":"call_","name":"","arguments":"{\\"command\\":\\""}],'
    b'"tool_call_id":null,"name":null},"finish_reason":"tool_calls","dialect":"","kind":"generation",'
    b'"asked":{"temperature":null,"top_p":null,"top_k":null,"seed":null,"max_tokens":null,"stop":[],'
    b'"logit_bias":[],"presence_penalty":0.0,"frequency_penalty":0.0},"used":{"temperature":1.0,"top_p":1.0,'
    b'"top_k":-1,"seed":0,"max_tokens":4096,"stop":[],"logit_bias":[],"presence_penalty":0.0,'
    b'"frequency_penalty":0.0},"started_at":17,"first_token_at":17,"ended_at":17,"untrainable":null,"extra":{},'
    b'"after":"","past_answer":true,"continues":"","continuation":"clean","resumes":null,"shared_messages":0,'
    b'"messages":[{"role":"tool","content":"","reasoning":null,"tool_calls":[],"tool_call_id":"call_",'
    b'"name":null}],"tools":"","lengths":[',
    dict_type=zstandard.DICT_TYPE_RAWCONTENT,
)
"""What records have in common; part of the format, so it changes only with VERSION."""

_LEVEL = -1
"""Up to a third larger than by default, in two thirds of the time: a file is kept only until its session's
recording, which is compressed better, has been made of it."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole record of a file."""

    end: int
    """Where the next one begins."""
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of a file in which no frame is whole."""

    start: int
    end: int


class _Codecs(threading.local):
    """One compressor for each thread: its tables take a third of a megabyte."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(_LEVEL, dict_data=_COMMON_WORDS)
        self.decompressor = zstandard.ZstdDecompressor(dict_data=_COMMON_WORDS)


_CODECS = _Codecs()


def frame(document: dict[str, Any], arrays: Sequence[Array] = ()) -> bytes:
    payload = _CODECS.compressor.compress(packed(document, arrays))
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def opened(payload: bytes, dtypes: Sequence[type[Any]]) -> tuple[dict[str, Any], list[Array]]:
    """Document and arrays of a frame; ValueError if it is not one."""
    try:
        return unpacked(_CODECS.decompressor.decompress(payload), dtypes)
    except (struct.error, zstandard.ZstdError, KeyError, TypeError) as error:
        raise ValueError(f"its record does not open: {error}") from None


def packed(document: dict[str, Any], arrays: Sequence[Array] = ()) -> bytes:
    """A JSON document and arrays of four-byte numbers, to be compressed.

    Arrays lie byte plane by byte plane: the high bytes of token ids are mostly zero and those of logprobs
    alike, which a compressor only sees when they stand together.
    """
    text = orjson.dumps(document | {"lengths": [len(array) for array in arrays]})
    planes = (array.view(np.uint8).reshape(-1, 4).T.tobytes() for array in arrays)
    return b"".join([_LENGTH.pack(len(text)), text, *planes])


def unpacked(data: bytes, dtypes: Sequence[type[Any]]) -> tuple[dict[str, Any], list[Array]]:
    """What `packed` was given; ValueError, KeyError, TypeError or struct.error if it made no such thing."""
    (length,) = _LENGTH.unpack_from(data)
    offset = _LENGTH.size + length
    document = orjson.loads(memoryview(data)[_LENGTH.size : offset])
    arrays: list[Array] = []
    for count, dtype in zip(document["lengths"], dtypes, strict=False):
        low, *higher = np.frombuffer(data, np.uint8, 4 * count, offset).reshape(4, count)
        numbers = low.astype("<u4")
        for place, plane in enumerate(higher, 1):
            numbers |= plane.astype("<u4") << np.uint32(8 * place)
        numbers.flags.writeable = False
        arrays.append(numbers.view(dtype))
        offset += 4 * count
    if offset != len(data):
        raise ValueError(f"its arrays end at byte {offset} of {len(data)}")
    return document, arrays


def frames(data: bytes) -> Iterator[Frame | Damage]:
    """The frames of a file and the stretches between them; a last frame that was not finished is one, too."""
    offset = len(MAGIC)
    while offset < len(data):
        found = _sound(data, offset) or Damage(offset, _next_sound(data, offset + 1) or len(data))
        yield found
        offset = found.end


def _sound(data: bytes, offset: int) -> Frame | None:
    if offset + _FRAME.size > len(data):
        return None
    length, checksum = _FRAME.unpack_from(data, offset)
    start = offset + _FRAME.size
    if not 0 < length <= len(data) - start:
        return None
    payload = data[start : start + length]
    return Frame(start + length, payload) if zlib.crc32(payload) == checksum else None


def _next_sound(data: bytes, start: int) -> int | None:
    """Where the first sound frame at or after `start` begins: only where a compressed payload does."""
    found = data.find(zstandard.FRAME_HEADER, start + _FRAME.size)
    while found >= 0:
        if _sound(data, found - _FRAME.size) is not None:
            return found - _FRAME.size
        found = data.find(zstandard.FRAME_HEADER, found + 1)
    return None
