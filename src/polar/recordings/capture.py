"""A session's token tree on disk while it grows: an append-only log that survives kill -9.

A record is a completion with its link, as what it adds to the tree. It goes to the operating system in a
single write, so a killed process tears at most the last one. Any other damage costs only itself and what
hangs on it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import orjson

from polar.errors import NotFound, PolarError
from polar.models.chat import ToolDefinition
from polar.models.completion import Completion
from polar.recordings.codec import DTYPES, Columns, TreeReader, columns, header, message_base
from polar.recordings.frames import FAMILY, MAGIC, VERSION, Damage, Frame, frame, frames, opened
from polar.recordings.growth import GrowingTree, Turn, has_ended
from polar.recordings.tree import TokenTree


class CaptureError(PolarError):
    """A capture cannot be written, or is not one."""


class CaptureWriter:
    """Commits completions to one session's tree, and its tree to the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tree = GrowingTree()
        self._known_tools: set[str] = set()
        self._latest_tools: tuple[tuple[ToolDefinition, ...], str | None] = ((), None)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.length = _sound_length(path) if path.exists() else 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._file, self.length)
        if self.length == 0:
            self._write(MAGIC)

    def append(self, completion: Completion) -> Turn:
        """Commit a completion; `parent` and `follows` are hints at what it extends."""
        tools = self._append_tools(completion.tools)
        turn = self._tree.prove(
            completion.id,
            completion.prompt_ids,
            completion.sampled_ids,
            (*completion.messages, completion.response),
            hints=(completion.parent, completion.follows),
            has_ended=has_ended(completion.finish_reason),
        )
        known = self._tree.messages_of(message_base(turn.link))
        record = header(completion, turn.link, self._tree.ids, known, tools)
        self._write(frame({"record": "completion"} | record, columns(completion, turn.link)))
        self._tree.add(turn)
        return turn

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append_tools(self, tools: tuple[ToolDefinition, ...]) -> str | None:
        if tools is self._latest_tools[0]:
            return self._latest_tools[1]
        if not tools:
            return None
        digest = hashlib.blake2b(orjson.dumps(tools), digest_size=16).hexdigest()
        if digest not in self._known_tools:
            self._write(frame({"record": "tools", "hash": digest, "tools": tools}))
            self._known_tools.add(digest)
        self._latest_tools = (tools, digest)
        return digest

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError("the disk is full")
        except OSError as error:
            os.ftruncate(self._file, self.length)
            raise CaptureError(
                f"{self.path}: cannot be written: {error.strerror or error}", hint="free some disk space"
            ) from error
        self.length += len(data)


def read_capture(path: Path) -> list[Completion]:
    """Every completion that was written, in order, each with its full prompt; CaptureError if one is lost."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"{path}: no such capture") from None
    tree = parse_capture(data, path)
    if tree.faults:
        fault = tree.faults[0]
        raise CaptureError(f"{path}: completion {fault.completion or 'unknown'}: {fault.problem}")
    return list(tree.completions)


def parse_capture(data: bytes, path: Path = Path("capture")) -> TokenTree:
    """The tree in a log; CaptureError if the bytes are no log at all. `path` only names them."""
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return TokenTree()
        raise CaptureError(f"{path}: {_what_else(data)}")
    reader = TreeReader()
    for part in frames(data):
        if isinstance(part, Damage):
            reader.fault(None, f"bytes {part.start} to {part.end} of its capture are damaged or unfinished")
        else:
            _add(reader, part.payload)
    return reader.tree()


def _add(reader: TreeReader, payload: bytes) -> None:
    name: str | None = None
    try:
        record, arrays = opened(payload, DTYPES)
        if record["record"] == "tools":
            reader.tools[record["hash"]] = tuple(ToolDefinition(**tool) for tool in record["tools"])
        else:
            name = record["id"]
            reader.add(record, Columns(*arrays))
    except (ValueError, KeyError, TypeError) as error:
        reader.fault(name, f"its record cannot be read: {error}")


def _sound_length(path: Path) -> int:
    """How much of a log to keep when it is opened for appending: all but a torn last record."""
    data = path.read_bytes()
    if data and not data.startswith(MAGIC) and not MAGIC.startswith(data):
        raise CaptureError(f"{path}: {_what_else(data)}")
    sound = len(MAGIC) if data.startswith(MAGIC) else 0
    return max([sound, *(part.end for part in frames(data) if isinstance(part, Frame))])


def _what_else(data: bytes) -> str:
    is_capture = data.startswith(FAMILY)
    return f"a capture of another version than {VERSION}" if is_capture else "not a capture"
