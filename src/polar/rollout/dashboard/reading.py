"""Reads recordings and artifacts for the session page, and keeps the last few recordings at hand."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from polar.engines.vocabulary import local_tokenizer, pieces
from polar.errors import NotFound, PolarError
from polar.models.dashboard import ArtifactLine, ArtifactList, ArtifactText, TokenSlice
from polar.recordings.recording import decode
from polar.rollout.dashboard.outline import OutlinedRecording, finite
from polar.store.blobs import BlobName
from polar.store.store import Blob, Store

RECORDINGS_AT_HAND = 4
TEXT_BYTES = 256 * 1024
"""How much of one artifact is shown; the whole is in the archive."""


class RecordingReader:
    """Reads the recordings of one store. A recording never changes, so one that was decoded stays good."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._at_hand: OrderedDict[BlobName, OutlinedRecording] = OrderedDict()

    async def recording(self, session_id: str) -> OutlinedRecording:
        blob = await self._store.recording(session_id)
        found = self._at_hand.get(blob.name)
        if found is None:
            data = await _whole(blob)
            found = await asyncio.to_thread(_outlined, data)
            self._at_hand[blob.name] = found
            while len(self._at_hand) > RECORDINGS_AT_HAND:
                self._at_hand.popitem(last=False)
        self._at_hand.move_to_end(blob.name)
        return found

    async def tokens(self, session_id: str, segment: int, start: int, count: int) -> TokenSlice:
        opened = await self.recording(session_id)
        return await asyncio.to_thread(_tokens, opened, segment, start, count)

    async def artifacts(self, session_id: str) -> ArtifactList:
        with await self._archive(session_id) as archive:
            files = [ArtifactLine(name=one.filename, size=one.file_size) for one in archive.infolist()]
        return ArtifactList(files=tuple(files))

    async def artifact(self, session_id: str, name: str) -> ArtifactText:
        with await self._archive(session_id) as archive:
            try:
                member = archive.open(name)
            except KeyError:
                raise NotFound(f"session {session_id!r} has no artifact {name!r}") from None
            with member:
                begun = member.read(TEXT_BYTES + 1)
        text = None if b"\0" in begun else begun[:TEXT_BYTES].decode(errors="replace")
        return ArtifactText(name=name, text=text, is_cut=len(begun) > TEXT_BYTES)

    async def _archive(self, session_id: str) -> zipfile.ZipFile:
        blob = await self._store.artifact_archive(session_id)
        try:
            return zipfile.ZipFile(blob.path or io.BytesIO(await _whole(blob)))
        except zipfile.BadZipFile as error:
            raise PolarError(f"the artifacts of session {session_id!r} are damaged: {error}") from None


async def _whole(blob: Blob) -> bytes:
    return b"".join([chunk async for chunk in blob.chunks()])


def _outlined(data: bytes) -> OutlinedRecording:
    recording = decode(data)
    return OutlinedRecording(recording, has_texts=tokenizer_of(recording.result.model) is not None)


def _tokens(opened: OutlinedRecording, index: int, start: int, count: int) -> TokenSlice:
    segment = opened.segment(index)
    end = min(start + count, len(segment.ids))
    ids = segment.ids[start:end].tolist()
    tokenizer = tokenizer_of(opened.recording.result.model)
    logprobs, versions = segment.logprobs, segment.policy_versions
    return TokenSlice(
        segment=index,
        start=start,
        ids=tuple(ids),
        texts=tuple(pieces(tokenizer, ids)) if tokenizer is not None else None,
        logprobs=tuple(map(finite, logprobs[start:end].tolist())) if logprobs is not None else None,
        versions=tuple(versions[start:end].tolist()) if versions is not None else None,
        next=end if end < len(segment.ids) else None,
    )


def tokenizer_of(model: str | None) -> Tokenizer | None:
    """A model's tokenizer, if it is on this machine."""
    path = local_tokenizer(model)
    return _loaded(path) if path is not None else None


@lru_cache(maxsize=2)
def _loaded(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
