"""A session's completions on disk: an append-only log that holds each token once and survives kill -9.

A file begins with MAGIC; then come frames: length and CRC-32 of the payload (two little-endian u32),
the payload. A payload is one byte (0 plain, 1 zstd) and a body: u32 length of a JSON header, the
header, then the record's arrays one after another. A record goes to the operating system in a
single write, so a killed process tears at most the last one, and the reader stops before it.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from polar.errors import NotFound, PolarError
from polar.models.chat import FinishReason, Message, Role, Sampling, ToolCall, ToolDefinition
from polar.models.completion import Completion, CompletionKind, Ids

MAGIC = b"polar-capture-1\n"
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_PLAIN, _ZSTD = b"\0", b"\1"
_COMPRESS_FROM = 256
"""Below this many bytes a frame is all header and compression rarely pays."""
_ARRAYS: tuple[tuple[str, type[np.generic]], ...] = (
    ("prompt", np.int32),
    ("sampled", np.int32),
    ("logprobs", np.float32),
    ("versions", np.int32),
)


class CaptureError(PolarError):
    """A capture cannot be written or is damaged in its middle."""


class CaptureWriter:
    """Appends completions to one session's log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known_tools: set[str] = set()
        self._known: dict[str, tuple[int, int]] = {}
        """Completion id → how many tokens and messages its children share with it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._length = _sound_length(path.read_bytes())
        os.ftruncate(self._file, self._length)
        if self._length == 0:
            self._write(MAGIC)

    def append(self, completion: Completion) -> None:
        tools = self._append_tools(completion.tools)
        shared_tokens, shared_messages = self._known.get(completion.parent or "", (0, 0))
        header = _header(completion, tools, shared_messages)
        arrays = [
            np.ascontiguousarray(values, dtype)
            for values, (_, dtype) in zip(
                (
                    completion.prompt_ids[shared_tokens:],
                    completion.sampled_ids,
                    completion.logprobs,
                    completion.policy_versions,
                ),
                _ARRAYS,
                strict=True,
            )
        ]
        self._write(_frame(header | {"lengths": [len(array) for array in arrays]}, arrays))
        tokens = len(completion.prompt_ids) + len(completion.sampled_ids)
        self._known[completion.id] = (tokens, len(completion.messages) + 1)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append_tools(self, tools: tuple[ToolDefinition, ...]) -> str | None:
        if not tools:
            return None
        listed = [asdict(tool) for tool in tools]
        digest = hashlib.blake2b(orjson.dumps(listed), digest_size=16).hexdigest()
        if digest not in self._known_tools:
            self._write(_frame({"record": "tools", "hash": digest, "tools": listed}, []))
            self._known_tools.add(digest)
        return digest

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError("the disk is full")
        except OSError as error:
            os.ftruncate(self._file, self._length)
            raise CaptureError(
                f"{self.path}: cannot be written: {error.strerror or error}", hint="free some disk space"
            ) from error
        self._length += len(data)


def read_capture(path: Path) -> list[Completion]:
    """Every completion that was written whole, in order, each with its full prompt and messages."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"{path}: no such capture") from None
    return parse_capture(data, path)


def parse_capture(data: bytes, path: Path = Path("capture")) -> list[Completion]:
    """As `read_capture`, from the log's bytes; `path` only names them in errors."""
    tools: dict[str, tuple[ToolDefinition, ...]] = {}
    found: dict[str, Completion] = {}
    for header, arrays in _records(data, path):
        if header["record"] == "tools":
            tools[header["hash"]] = tuple(ToolDefinition(**tool) for tool in header["tools"])
            continue
        completion = _completion(header, arrays, found.get(header["parent"]), tools.get(header["tools"], ()))
        found[completion.id] = replace(completion, index=len(found))
    return list(found.values())


def _frame(header: dict[str, Any], arrays: list[np.ndarray[Any, Any]]) -> bytes:
    text = orjson.dumps(header)
    body = b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays)])
    payload = _PLAIN + body
    if len(body) >= _COMPRESS_FROM:
        packed = zstandard.compress(body)
        if len(packed) < len(body):
            payload = _ZSTD + packed
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _frames(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """End offset and payload of each frame that fits into the data; a damaged payload is None."""
    if not data.startswith(MAGIC):
        return
    offset = len(MAGIC)
    while offset + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, offset)
        start = offset + _FRAME.size
        offset = start + length
        if offset > len(data):
            return
        payload = data[start:offset]
        yield offset, payload if length and zlib.crc32(payload) == checksum else None


def _sound_length(data: bytes) -> int:
    """How much of a log to keep when it is opened for appending: all but a torn last record."""
    sound = len(MAGIC) if data.startswith(MAGIC) else 0
    if data and not sound and not MAGIC.startswith(data):
        raise CaptureError("the file to append to is not a capture")
    for end, payload in _frames(data):
        if payload is None:
            break
        sound = end
    return sound


def _records(data: bytes, path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    if not data.startswith(MAGIC) and not MAGIC.startswith(data):
        raise CaptureError(f"{path}: not a capture")
    for end, payload in _frames(data):
        if payload is None:
            if end == len(data):
                return
            raise CaptureError(f"{path}: damaged before byte {end}", hint="restore it from a copy")
        body = payload[1:] if payload[:1] == _PLAIN else zstandard.decompress(payload[1:])
        (length,) = _LENGTH.unpack_from(body)
        yield orjson.loads(body[_LENGTH.size : _LENGTH.size + length]), body[_LENGTH.size + length :]


def _header(completion: Completion, tools: str | None, shared_messages: int) -> dict[str, Any]:
    return {
        "record": "completion",
        "id": completion.id,
        "parent": completion.parent,
        "messages": [asdict(message) for message in completion.messages[shared_messages:]],
        "response": asdict(completion.response),
        "finish_reason": completion.finish_reason,
        "tools": tools,
        "dialect": completion.dialect,
        "kind": completion.kind,
        "asked": asdict(completion.asked),
        "used": asdict(completion.used),
        "times": [completion.started_at, completion.first_token_at, completion.ended_at],
        "untrainable": completion.untrainable,
        "extra": completion.extra,
    }


def _completion(
    header: dict[str, Any], data: bytes, parent: Completion | None, tools: tuple[ToolDefinition, ...]
) -> Completion:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    offset = 0
    for (name, dtype), length in zip(_ARRAYS, header["lengths"], strict=True):
        arrays[name] = np.frombuffer(data, dtype, length, offset)
        offset += arrays[name].nbytes
    prompt: Ids = arrays["prompt"]
    messages = tuple(map(_message, header["messages"]))
    if parent is not None:
        prompt = np.concatenate([parent.prompt_ids, parent.sampled_ids, prompt])
        messages = (*parent.messages, parent.response, *messages)
    started_at, first_token_at, ended_at = header["times"]
    return Completion(
        id=header["id"],
        index=0,
        prompt_ids=prompt,
        sampled_ids=arrays["sampled"],
        logprobs=arrays["logprobs"],
        policy_versions=arrays["versions"],
        messages=messages,
        response=_message(header["response"]),
        finish_reason=FinishReason(header["finish_reason"]),
        parent=header["parent"],
        tools=tools,
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
