"""Records in an append-only file: each checked and compressed by itself, so that damage stays where it is.

A file begins with MAGIC; then come frames: length and CRC-32 of the payload (two little-endian u32), the
payload. A payload is the u32 length of a compressed JSON header, that header, and the compressed arrays.
Arrays have four bytes an element and lie byte plane by byte plane: the high bytes of token ids are mostly
zero and those of logprobs alike, which a compressor only sees when they stand together.
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
_HEADER_WORDS = zstandard.ZstdCompressionDict(
    b'{"record":"tools","hash":"","tools":[{"name":"","description":"","parameters":{"type":"object",'
    b'"properties":{"required":[{"record":"completion","id":"","after":"","past_answer":true,"continues":"",'
    b'"continuation":"clean","resumes":null,"follows":"","shared_messages":0,"messages":[{"role":"system","content":"","reasoning":null,"tool_calls":[],"tool_call_id":"call_",'
    b'"name":null}],"response":{"role":"assistant","content":"","reasoning":null,"tool_calls":[{"id":"call_",'
    b'"name":"","arguments":"{\\"command\\":\\""}],"tool_call_id":null,"name":null},"finish_reason":"tool_calls",'
    b'"tools":"","dialect":"","kind":"generation","asked":{"temperature":null,"top_p":null,"top_k":null,'
    b'"seed":null,"max_tokens":null,"stop":[],"logit_bias":[]},"used":{"temperature":1.0,"top_p":1.0,'
    b'"top_k":-1,"seed":0,"max_tokens":4096,"stop":[],"logit_bias":[]},"times":[17],"untrainable":null,'
    b'"extra":{},"lengths":[',
    dict_type=zstandard.DICT_TYPE_RAWCONTENT,
)
"""What headers have in common; part of the format, so it changes only with VERSION."""

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


class FrameWriter:
    """Makes frames; not to be shared between threads."""

    def __init__(self) -> None:
        self._headers = zstandard.ZstdCompressor(_LEVEL, dict_data=_HEADER_WORDS)
        self._arrays = zstandard.ZstdCompressor(_LEVEL)

    def frame(self, header: dict[str, Any], arrays: Sequence[Array] = ()) -> bytes:
        packed = self._headers.compress(orjson.dumps(header | {"lengths": [len(array) for array in arrays]}))
        numbers = b"".join(map(planes, arrays))
        payload = _LENGTH.pack(len(packed)) + packed + (self._arrays.compress(numbers) if numbers else b"")
        return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


class _Own(threading.local):
    """What each thread has one of."""

    def __init__(self) -> None:
        self.writer = FrameWriter()


_OWN = _Own()


def frame(header: dict[str, Any], arrays: Sequence[Array] = ()) -> bytes:
    """A frame for any file, made by the calling thread's one writer.

    A writer's tables take a third of a megabyte: a thousand of them would be neither small nor in any cache.
    """
    return _OWN.writer.frame(header, arrays)


class FrameReader:
    """Takes frames apart; not to be shared between threads."""

    def __init__(self) -> None:
        self._headers = zstandard.ZstdDecompressor(dict_data=_HEADER_WORDS)
        self._arrays = zstandard.ZstdDecompressor()

    def open(self, payload: bytes, dtypes: Sequence[type[np.generic]]) -> tuple[dict[str, Any], list[Array]]:
        """Header and arrays of a frame; ValueError if it is not one."""
        try:
            (length,) = _LENGTH.unpack_from(payload)
            start = _LENGTH.size + length
            header = orjson.loads(self._headers.decompress(payload[_LENGTH.size : start]))
            numbers = self._arrays.decompress(payload[start:]) if len(payload) > start else b""
            lengths = header["lengths"]
        except (struct.error, zstandard.ZstdError, KeyError, TypeError) as error:
            raise ValueError(f"its record does not open: {error}") from None
        if 4 * sum(lengths) != len(numbers):
            raise ValueError(f"its arrays have {len(numbers)} bytes for {sum(lengths)} numbers")
        arrays: list[Array] = []
        offset = 0
        for count, dtype in zip(lengths, dtypes, strict=False):
            arrays.append(from_planes(numbers, offset, count, dtype))
            offset += arrays[-1].nbytes
        return header, arrays


def planes(array: Array) -> bytes:
    """An array of four-byte numbers, byte plane by byte plane."""
    return array.view(np.uint8).reshape(-1, 4).T.tobytes()


def from_planes(data: bytes, offset: int, count: int, dtype: Any) -> Array:
    """The array of `count` numbers whose planes begin at `offset`."""
    low, *higher = np.frombuffer(data, np.uint8, 4 * count, offset).reshape(4, count)
    numbers = low.astype("<u4")
    for place, plane in enumerate(higher, 1):
        numbers |= plane.astype("<u4") << np.uint32(8 * place)
    array: Array = numbers.view(dtype)
    return array


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
    """Where the first sound frame at or after `start` begins."""
    rest = np.frombuffer(data, np.uint8, offset=start)
    count = len(rest) - _FRAME.size
    if count <= 0:
        return None
    claimed = sum(rest[byte : count + byte].astype(np.int64) << 8 * byte for byte in range(4))
    fits = (claimed > 0) & (claimed <= count - np.arange(count))
    for candidate in np.flatnonzero(fits).tolist():
        if _sound(data, start + candidate) is not None:
            return int(start + candidate)
    return None
