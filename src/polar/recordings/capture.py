"""A session's token tree on disk while it grows: an append-only log that survives kill -9.

The log begins with MAGIC; then come frames: length and CRC-32 of the payload (two little-endian u32), and the
payload, which is a compressed record. A record is a completion with its link, as what it adds to the tree. It
goes to the operating system in a single write, so a killed process tears at most the last one. Any other
damage costs only itself and what hangs on it.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zstandard

from polar.errors import PolarError
from polar.models.completion import Completion
from polar.recordings.codec import Record, TreeReader, TreeWriter, message_base, packed, unpacked
from polar.recordings.growth import GrowingTree, Turn, has_ended
from polar.recordings.tree import TokenTree

VERSION = 4
FAMILY = b"polar-capture-"
MAGIC = FAMILY + b"%d\n" % VERSION
_FRAME = struct.Struct("<II")
_COMMON_WORDS = zstandard.ZstdCompressionDict(
    b'{"record":"tools","hash":"","tools":[{"name":"","description":"","parameters":{"type":"object",'
    b'"properties":{"required":[{"record":"completion","id":"","follows":"","response":{"role":"assistant",'
    b'"content":"","reasoning":null,"tool_calls":[{"id":"call_","name":"","arguments":"{\\"command\\":\\""}],'
    b'"tool_call_id":null,"name":null},"finish_reason":"tool_calls","dialect":"",'
    b'"asked":{"temperature":null,"top_p":null,"top_k":null,"seed":null,"max_tokens":null,"stop":[],'
    b'"logit_bias":[],"presence_penalty":0.0,"frequency_penalty":0.0},"used":{"temperature":1.0,"top_p":1.0,'
    b'"top_k":-1,"seed":0,"max_tokens":4096,"stop":[],"logit_bias":[],"presence_penalty":0.0,'
    b'"frequency_penalty":0.0},"started_at":17,"first_token_at":17,"ended_at":17,"untrainable":null,"extra":{},'
    b'"after":"","past_answer":true,"continues":"","continuation":"clean","resumes":null,"shared_messages":0,'
    b'"messages":[{"role":"tool","content":"","reasoning":null,"tool_calls":[],"tool_call_id":"call_",'
    b'"name":null}],"tools":"","lengths":[',
    dict_type=zstandard.DICT_TYPE_RAWCONTENT,
)
"""Common text of records, to prime compression; part of the format, so it changes only with VERSION."""

_LEVEL = -1
"""Up to a third larger than by default, in two thirds of the time: a file is kept only until its session's
recording, which is compressed better, has been made of it."""


class CaptureError(PolarError):
    """A capture cannot be written, or is not one."""


class CaptureUnwritable(CaptureError):
    """An answer that cannot be captured."""


class CaptureWriter:
    """Commits completions to one session's tree, and its tree to the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tree = GrowingTree()
        self._writer = TreeWriter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.length = _sound_length(path) if path.exists() else 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._file, self.length)
        if self.length == 0:
            try:
                self._write(MAGIC)
            except CaptureError:
                self.close()
                raise

    def append(self, completion: Completion) -> Turn:
        """Commit a completion; `parent` and `follows` are hints at what it extends."""
        turn = self._tree.prove(
            completion.id,
            completion.prompt_ids,
            completion.sampled_ids,
            (*completion.messages, completion.response),
            hints=(completion.parent, completion.follows),
            has_ended=has_ended(completion.finish_reason),
        )
        known = self._tree.messages_of(message_base(turn.link))
        for record in self._writer.records(completion, turn.link, known):
            self._write(frame(record))
        return self._tree.add(turn)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError("the disk is full")
        except OSError as error:
            os.ftruncate(self._file, self.length)
            raise CaptureUnwritable(
                f"{self.path}: cannot be written: {error.strerror or error}", hint="free some disk space"
            ) from error
        self.length += len(data)


def parse_capture(data: bytes, path: Path = Path("capture")) -> TokenTree:
    """The tree in a log; CaptureError if the bytes are no log at all. `path` only names them.

    Logs of one session may follow one another.
    """
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return TokenTree()
        raise CaptureError(f"{path}: {_what_else(data)}")
    reader = TreeReader()
    for part in frames(data):
        if part.payload is None:
            reader.fault(None, f"bytes {part.start} to {part.end} of its capture are damaged or unfinished")
        else:
            _add(reader, part.payload)
    return reader.tree()


class CaptureReader:
    """Reads a log in pieces while it grows. A record counts once all of it is there."""

    def __init__(self) -> None:
        self.tree = TreeReader()
        self._rest = b""

    def feed(self, data: bytes) -> None:
        data = MAGIC + self._rest + data
        self._rest = b""
        for part in frames(data):
            if part.payload is not None:
                _add(self.tree, part.payload)
            elif part.end == len(data):
                self._rest = data[part.start :]


def _add(reader: TreeReader, payload: bytes) -> None:
    name: str | None = None
    try:
        record = opened(payload)
        name = record.document.get("id")
        reader.add(record)
    except (ValueError, KeyError, TypeError) as error:
        reader.fault(name, f"its record cannot be read: {error}")


def _sound_length(path: Path) -> int:
    """Length of a log up to a torn last record, to append to it."""
    data = path.read_bytes()
    if data and not data.startswith(MAGIC) and not MAGIC.startswith(data):
        raise CaptureError(f"{path}: {_what_else(data)}")
    sound = len(MAGIC) if data.startswith(MAGIC) else 0
    return max([sound, *(part.end for part in frames(data) if part.payload is not None)])


def _what_else(data: bytes) -> str:
    is_capture = data.startswith(FAMILY)
    return f"a capture of another version than {VERSION}" if is_capture else "not a capture"


class Stretch(NamedTuple):
    """A frame of a log, or what lies between two."""

    start: int
    end: int
    payload: bytes | None
    """The payload; None if the stretch has no sound frame."""


class _Codecs(threading.local):
    """One compressor for each thread: its tables take a third of a megabyte."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(_LEVEL, dict_data=_COMMON_WORDS)
        self.decompressor = zstandard.ZstdDecompressor(dict_data=_COMMON_WORDS)


_CODECS = _Codecs()


def frame(record: Record) -> bytes:
    payload = _CODECS.compressor.compress(packed([record]))
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def opened(payload: bytes) -> Record:
    """The record in a frame; ValueError if there is none."""
    try:
        (record,) = unpacked(_CODECS.decompressor.decompress(payload))
        return record
    except (struct.error, zstandard.ZstdError, KeyError, TypeError) as error:
        raise ValueError(f"its record does not open: {error}") from None


def frames(data: bytes) -> Iterator[Stretch]:
    """The frames of a log and what lies between them; a last frame that was not finished, too."""
    offset = len(MAGIC)
    while offset < len(data):
        if data.startswith(MAGIC, offset):
            offset += len(MAGIC)
            continue
        found = _sound(data, offset) or Stretch(offset, _next_sound(data, offset + 1) or len(data), None)
        yield found
        offset = found.end


def _sound(data: bytes, offset: int) -> Stretch | None:
    if offset + _FRAME.size > len(data):
        return None
    length, checksum = _FRAME.unpack_from(data, offset)
    start = offset + _FRAME.size
    if not 0 < length <= len(data) - start:
        return None
    payload = data[start : start + length]
    return Stretch(offset, start + length, payload) if zlib.crc32(payload) == checksum else None


def _next_sound(data: bytes, start: int) -> int | None:
    """Position of the first sound frame at or after `start`, which has a compressed payload."""
    found = data.find(zstandard.FRAME_HEADER, start + _FRAME.size)
    while found >= 0:
        if _sound(data, found - _FRAME.size) is not None:
            return found - _FRAME.size
        found = data.find(zstandard.FRAME_HEADER, found + 1)
    return None
