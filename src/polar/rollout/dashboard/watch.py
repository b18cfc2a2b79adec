"""A session's conversation as it grows, for everyone who watches it: server-sent events that can be resumed.

What running sessions capture comes to the server as it grows. A watched session is read once for all who
watch it here, and each of them has a place in it. Nothing is queued for anyone: whoever reads slowly is sent
what there is by then. Once the session has ended its recording is compared with what was read before, and
whoever was told something else is told to begin anew.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from polar.engines.vocabulary import pieces
from polar.errors import PolarError
from polar.models.completion import Completion
from polar.models.dashboard import WatchedSession, WatchEvent, WatchRestart
from polar.models.views import SessionView
from polar.recordings.capture import CaptureReader
from polar.recordings.tree import Link
from polar.rollout.dashboard.outline import watched_call
from polar.rollout.dashboard.reading import RecordingReader, tokenizer_of
from polar.rollout.long_poll import Gone, Notifier
from polar.store.store import Store

LOOK_SECONDS = 2.0
"""How often a watched session is looked for in the store; what comes to this process is told of at once."""
PAUSE_SECONDS = 0.05
"""Pause between two looks: what comes in quick succession is told together."""
QUIET_SECONDS = 15.0
"""A stream in which nothing happens says so this often, so that nothing in between closes it."""


@dataclass(slots=True)
class _Bookmark:
    """How much somebody was told of a session."""

    calls: int = 0
    mark: int = 0
    """The mark of the last of these calls, which tells whether they still are what was told."""

    @classmethod
    def parse(cls, text: str | None) -> _Bookmark:
        """A place that was given as the id of an event; the beginning where it is none."""
        calls, _, mark = (text or "").partition("-")
        try:
            return cls(max(int(calls), 0), int(mark, 16))
        except ValueError:
            return cls()

    def __str__(self) -> str:
        return f"{self.calls}-{self.mark:08x}"


class Watches:
    """The sessions that somebody watches through this process."""

    def __init__(self, store: Store) -> None:
        self.reader = RecordingReader(store)
        self._store = store
        self._watched: dict[str, _Watched] = {}
        self._is_closed = False

    def look(self, session_ids: Iterable[str]) -> None:
        """Look at once for what is new of these sessions, as far as they are watched."""
        for id in self._watched.keys() & set(session_ids):
            self._watched[id].look()

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        self.look(list(self._watched))

    async def stream(self, session_id: str, after: str | None, gone: Gone) -> AsyncIterator[str]:
        """Frames until the session has ended, the caller hangs up or the server closes.

        `after`: the id of the last event that the caller has had.
        """
        watched = self._watched.get(session_id)
        if watched is None:
            watched = self._watched[session_id] = _Watched(session_id, self._store, self.reader)
        watched.watchers += 1
        try:
            async for frame in self._frames(watched, _Bookmark.parse(after), gone):
                yield frame
        finally:
            watched.watchers -= 1
            if not watched.watchers:
                del self._watched[session_id]

    async def _frames(self, watched: _Watched, place: _Bookmark, gone: Gone) -> AsyncIterator[str]:
        told: SessionView | None = None
        spoke = checked = time.monotonic()
        while not self._is_closed:
            news = watched.news.listen()
            session = await watched.read()
            frames = watched.frames(place)
            if session.result is None and _lasting(session) != told:
                told = _lasting(session)
                yield _frame(WatchedSession(session=session))
                spoke = time.monotonic()
            async for frame in frames:
                yield frame
                spoke = time.monotonic()
            if session.result is not None:
                yield _frame(WatchedSession(session=session))
                return
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await news.wait()
                    await asyncio.sleep(PAUSE_SECONDS)
            except TimeoutError:
                pass
            now = time.monotonic()
            if now - checked >= LOOK_SECONDS:
                checked = now
                if await gone():
                    return
            if now - spoke >= QUIET_SECONDS:
                spoke = now
                yield ": quiet\n\n"


class _Watched:
    """What is known here of one session that is watched."""

    def __init__(self, session_id: str, store: Store, reader: RecordingReader) -> None:
        self.watchers = 0
        self.news = Notifier()
        self._id = session_id
        self._store = store
        self._recordings = reader
        self._session: SessionView | None = None
        self._capture = CaptureReader()
        self._position = (0, 0)
        """Fencing token and length of the last piece of the capture that was read."""
        self._at: Callable[[int], tuple[Completion, Link]] = self._capture.tree.at
        self._marks: list[int] = []
        """One for each call: a checksum of what tells it, and those before it, from any other."""
        self._model: str | None = None
        self._lock = asyncio.Lock()
        self._is_stale = True
        self._looked = 0.0

    def look(self) -> None:
        self._is_stale = True
        self.news.notify()

    async def read(self) -> SessionView:
        """Read what is new. A session with a result is returned once its recording has been read."""
        async with self._lock:
            now, before = time.monotonic(), self._session
            is_due = self._is_stale or now - self._looked >= LOOK_SECONDS
            if before is not None and (before.result is not None or not is_due):
                return before
            self._is_stale, self._looked = False, now
            session = await self._store.sessions.get(self._id)
            if session.result is not None:
                await self._read_recording()
            else:
                if before is None or (session.attempt, session.node) != (before.attempt, before.node):
                    # Another attempt may have begun anew.
                    self._begin(CaptureReader())
                await self._read_capture()
            self._session = session
            return session

    def _begin(self, capture: CaptureReader) -> None:
        self._capture, self._position, self._at = capture, (0, 0), capture.tree.at
        self._marks = []

    async def _read_capture(self) -> None:
        while found := await self._store.captures.after(self._id, *self._position):
            await asyncio.to_thread(self._capture.feed, b"".join(data for _, _, data in found))
            self._position = found[-1][:2]
        self._add_marks(len(self._capture.tree))

    async def _read_recording(self) -> None:
        try:
            recording = (await self._recordings.recording(self._id)).recording
        except PolarError:
            # There is none, or it is damaged: what was captured stays.
            return
        tree = recording.tree
        self._at, self._marks = lambda place: (tree.completions[place], tree.links[place]), []
        self._model = recording.result.model
        self._add_marks(len(tree.completions))

    def _add_marks(self, count: int) -> None:
        for place in range(len(self._marks), count):
            completion, link = self._at(place)
            text = f"{completion.id} {completion.started_at} {completion.ended_at} {link}"
            self._marks.append(zlib.crc32(text.encode(), self._marks[-1] if self._marks else 0))

    async def frames(self, place: _Bookmark) -> AsyncIterator[str]:
        """What somebody at this place is not told yet, who is then further."""
        while True:
            marks = self._marks
            if place.calls and marks[place.calls - 1 : place.calls] != [place.mark]:
                place.calls = place.mark = 0
                yield _frame(WatchRestart())
            elif place.calls < len(marks):
                mark = marks[place.calls]
                frame = await asyncio.to_thread(self._call, self._at, place.calls)
                if marks is self._marks:
                    place.calls, place.mark = place.calls + 1, mark
                    yield f"id: {place}\n{frame}"
            else:
                return

    def _call(self, at: Callable[[int], tuple[Completion, Link]], place: int) -> str:
        tokenizer = tokenizer_of(self._model)
        return _frame(watched_call(at, place, partial(pieces, tokenizer) if tokenizer else None))


def _lasting(session: SessionView) -> SessionView:
    """Without the time of the last heartbeat."""
    return session.model_copy(update={"updated_at": 0.0})


def _frame(event: WatchEvent) -> str:
    return f"event: {event.kind}\ndata: {event.model_dump_json()}\n\n"
