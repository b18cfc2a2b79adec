"""Engines at a URL: requests, retries, and answers read as they arrive."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from itertools import chain, groupby
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from uuid import uuid4

import orjson

from polar.engines.base import (
    ChatCall,
    ChatChunk,
    ContextOverflow,
    Engine,
    EngineDown,
    EngineError,
    GenerateRequest,
    RequestUnfit,
    TokenChunk,
    Unconstrainable,
)
from polar.engines.connections import Connections, Disconnected, Exchange
from polar.errors import Backoff
from polar.models.chat import ChatRequest, Message, Role, Sampling, ToolDefinition

Chunk = TypeVar("Chunk", TokenChunk, ChatChunk)
Asked = TypeVar("Asked", GenerateRequest, ChatCall)

ATTEMPTS = 5
FIRST_BACKOFF_SECONDS = 0.1
"""Doubles with each attempt: at most 1.5 s in all, enough for an engine's restart of its listener, short of
any harness's patience."""
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 1_800.0
"""A request may wait long in the engine's queue or through a weight update; a session's own budget
ends it earlier. This only frees connections whose peer vanished without a word."""
QUESTION_SECONDS = 30.0
"""Timeout of requests that sample nothing."""
ORDER_SECONDS = 1_200.0
"""Timeout of pauses, which may wait for running generations, and of weight updates, which may be large."""
DRAIN_SECONDS = 0.5
"""Seconds to wait for the end of a stream after its last event, before dropping the connection."""

BUSY = frozenset({429, 502, 503, 504})
"""Status codes after which the request may be retried: nothing was sampled."""
_OVERFLOW_WORDS = (
    "context length",
    "context_length",
    "max_model_len",
    "maximum model length",
    "maximum allowed length",
)
_PROMPT_LENGTH = re.compile(
    r"(\d+) input tokens|\((\d+) in the messages|(\d+) tokens from the input|prompt \(length (\d+)\)"
)
"""Finds the prompt's length in an engine's message that a request does not fit."""
_DONE = b"[DONE]"
"""The data of a stream's last event."""


class NotAccepted(RequestUnfit):
    """The engine rejects the request; retrying cannot help."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """The engine's message without its URL."""


class Reader(ABC, Generic[Chunk]):
    """Turns the events of one answer into chunks."""

    def __init__(self, url: str, version: Callable[[], int]) -> None:
        self._url = url
        self._known_version = version
        """The weight version, if the server's answers do not name it."""
        self._tokens = 0
        """Number of tokens read."""
        self._has_spoken = False
        """Whether any text was read, even without tokens."""
        self._held: Chunk | None = None

    @abstractmethod
    def read(self, event: dict[str, Any]) -> Chunk | None:
        """Return the next chunk; the final one is held for what may follow it."""

    @abstractmethod
    def chunks(self, events: Iterable[dict[str, Any]]) -> Iterator[Chunk]:
        """Return the chunks of events that arrived together."""

    def last(self) -> Chunk:
        """The finishing chunk, after the last event."""
        if self._held is None:
            raise EngineError("the engine's answer ended before the completion did")
        return self._held

    def failure(self, status: int, reason: str) -> EngineError:
        """An error inside an answer; only before its first word may the request be tried elsewhere."""
        error = refusal(self._url, status, reason)
        has_begun = self._tokens > 0 or self._has_spoken
        return EngineError(error.message) if has_begun else error

    def raise_error(self, event: dict[str, Any], *, status: int = 500) -> None:
        """An event may be an error, with a status of its own or without: a grammar, say, is compiled, and
        refused, only after the stream has begun."""
        error = event.get("error")
        if error or event.get("object") == "error":
            code = (error if isinstance(error, dict) else event).get("code")
            raise self.failure(code if isinstance(code, int) else status, reason_in(orjson.dumps(event)))


class TokenReader(Reader[TokenChunk]):
    """Refuses tokens without ids or logprobs."""

    def chunks(self, events: Iterable[dict[str, Any]]) -> Iterator[TokenChunk]:
        return coalesce_chunks(map(self.read, events))


class Question(NamedTuple, Generic[Chunk]):
    """A request, and how to read its answer."""

    path: str
    body: dict[str, Any]
    reader: Reader[Chunk]


class HttpEngine(Engine):
    """An engine at a URL."""

    requirement: ClassVar[str]
    """Hint on what the server needs for its tokens to be usable."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        max_context: int | None = None,
    ) -> None:
        """`model` and `max_context` are what the settings say, for servers that do not say it themselves."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._max_context = max_context
        self.policy_version = 0
        """Stamped on tokens, as they come, when the server does not name the version itself."""
        self._model = ""
        """The served model name, once known."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections = Connections(
            self.url, headers, connect_seconds=CONNECT_SECONDS, silence_seconds=SILENCE_SECONDS
        )

    async def close(self) -> None:
        self._connections.close()

    async def _served_name(self) -> str:
        if not self._model:
            await self.model_info()
        return self._model

    async def _try_chat(self, *tools: ToolDefinition) -> str | None:
        """Return what is wrong with a short chat answer, if anything."""
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=1)
        chat = ChatRequest("", (Message(Role.USER, "Hi"),), tools)
        async with aclosing(self.chat(ChatCall(f"check-{uuid4().hex}", chat, sampling))) as chunks:
            return [chunk.untrainable async for chunk in chunks][-1]

    async def _answer(
        self, asked: Asked, question: Callable[[Asked], Awaitable[Question[Chunk]]]
    ) -> AsyncGenerator[Chunk, None]:
        path, body, reader = await question(asked)
        try:
            async with aclosing(self._events(path, body)) as arrivals:
                async for events in arrivals:
                    await self._recognise()
                    for chunk in reader.chunks(events):
                        yield chunk
        except NotAccepted as error:
            # Everything else in a request is the gateway's own and was accepted at start-up.
            if isinstance(asked, GenerateRequest) and asked.is_guided:
                raise Unconstrainable(f"the model cannot be held to what is asked: {error.reason}") from error
            raise
        yield reader.last()

    async def _recognise(self) -> None:
        """Identify the server before its events are read."""

    async def _get(self, path: str, *, older: str | None = None) -> dict[str, Any]:
        """The object at a path, or at the one it has on older servers; EngineDown if there is none (yet)."""
        status, answer = await self._ask("GET", path)
        if status == 404 and older is not None:
            return await self._get(older)
        if status != 200:
            raise EngineDown(f"the engine at {self.url} answers {status} to {path}: {reason_in(answer)}")
        try:
            return _object(answer)
        except EngineError as error:
            raise EngineError(
                f"the engine at {self.url} answers {path} with no JSON object",
                hint=f"it must be {self.requirement}",
            ) from error

    async def _ask(
        self, method: str, path: str, body: Any = None, *, seconds: float = QUESTION_SECONDS
    ) -> tuple[int, bytes]:
        """Status and body of an answer that is not streamed."""
        data = b"" if body is None else orjson.dumps(body)
        try:
            async with (
                asyncio.timeout(seconds),
                self._connections.request(method, path, data) as response,
            ):
                return response.status, await response.read()
        except (Disconnected, TimeoutError) as error:
            raise EngineDown(
                f"the engine at {self.url} cannot be reached: {str(error) or type(error).__name__}",
                hint="is it running, and is this its address?",
            ) from error

    async def _order(self, path: str, body: Any = None, *, needs: str) -> bytes:
        """Send a slow request; raise EngineError with a hint if it fails."""
        status, answer = await self._ask("POST", path, body, seconds=ORDER_SECONDS)
        if status == 404:
            raise EngineError(f"the engine at {self.url} has no {path.partition('?')[0]}", hint=needs)
        if status != 200:
            raise EngineError(f"the engine at {self.url} answers {status} to {path}: {reason_in(answer)}")
        return answer

    async def _document(self, path: str, body: Any) -> dict[str, Any]:
        """An answer that comes in one piece."""
        async with aclosing(self._events(path, body)) as arrivals:
            return next(await anext(arrivals))

    async def _events(self, path: str, body: Any) -> AsyncGenerator[Iterator[dict[str, Any]], None]:
        """The events of a generation, or its one document where the server does not stream.

        Those that have arrived at once come at once, to be read before the next. Trouble with an engine
        that is down or busy before the first one is tried again, later trouble is not. Closing the
        iterator closes the connection, which aborts the request.
        """
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        pauses = Backoff(FIRST_BACKOFF_SECONDS, CONNECT_SECONDS, attempts=ATTEMPTS).pauses()
        while True:
            has_begun = False
            try:
                async with self._connections.request("POST", path, data) as response:
                    if response.status != 200:
                        raise refusal(self.url, response.status, reason_in(await response.read()))
                    if response.content_type != "text/event-stream":
                        yield iter([_object(await response.read())])
                        return
                    async with aclosing(_read_events(response)) as arrivals:
                        async for events in arrivals:
                            has_begun = True
                            yield events
                return
            except EngineDown as error:
                problem = error
            except Disconnected as error:
                if has_begun:
                    raise EngineError(f"the engine at {self.url} broke off: {error}") from error
                problem = EngineDown(f"the engine at {self.url} cannot be reached: {error}")
            pause = next(pauses, None)
            if pause is None:
                raise problem
            await asyncio.sleep(pause)


async def _read_events(response: Exchange) -> AsyncGenerator[Iterator[dict[str, Any]], None]:
    """Parse server-sent events up to [DONE]. Lines may exceed any read buffer."""
    begun: list[bytes] = []
    while piece := await response.piece():
        begun.append(piece)
        # The experts of a long prompt are one line of many pieces: joined with each, it would take minutes.
        if b"\n" not in piece:
            continue
        *lines, tail = b"".join(begun).split(b"\n")
        begun = [tail]
        sent = [data for line in lines if line.startswith(b"data:") and (data := line[5:].strip())]
        is_done = _DONE in sent
        if is_done:
            del sent[sent.index(_DONE) :]
        if sent:
            yield map(_object, sent)
        if is_done:
            # Read to its end, so that the next request can use its connection.
            with suppress(Disconnected, TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await response.read()
            return


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the engine's answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EngineError("the engine's answer is no JSON object")
    return value


def refusal(url: str, status: int, reason: str) -> EngineError:
    """The error for a request that was refused before sampling."""
    if status == 400 and any(words in reason.lower() for words in _OVERFLOW_WORDS):
        told = _PROMPT_LENGTH.search(reason)
        return ContextOverflow(reason, prompt_tokens=int(next(filter(None, told.groups()))) if told else None)
    message = f"the engine at {url} answers {status}: {reason}"
    if status in BUSY:
        return EngineDown(message)
    return NotAccepted(message, reason=reason) if status in (400, 422) else EngineError(message)


def reason_in(body: bytes) -> str:
    """Extract the message of an error body of any known form, else its beginning."""
    with suppress(orjson.JSONDecodeError):
        document = orjson.loads(body)
        if isinstance(document, dict):
            error = document.get("error")
            inner = error if isinstance(error, dict) else document
            message = (
                inner.get("message")
                or inner.get("detail")
                or inner.get("error_message")
                or (error if isinstance(error, str) else None)
            )
            code = inner.get("code")
            if message:
                return f"{message} [{code}]" if isinstance(code, str) else str(message)
    return body[:300].decode("utf-8", "replace").strip() or "no reason given"


def coalesce_chunks(read: Iterable[TokenChunk | None]) -> Iterator[TokenChunk]:
    """Merge chunks of the same version; an error comes after what was read before it."""
    arrived: list[TokenChunk] = []
    failure: Exception | None = None
    try:
        for chunk in read:
            if chunk is None:
                continue
            arrived.append(chunk)
    except Exception as error:
        failure = error
    for version, alike in groupby(arrived, lambda chunk: chunk.policy_version):
        yield _merge_chunks(list(alike), version)
    if failure is not None:
        raise failure


def _merge_chunks(chunks: list[TokenChunk], version: int) -> TokenChunk:
    if len(chunks) == 1:
        return chunks[0]
    return TokenChunk(
        ids=list(chain.from_iterable(chunk.ids for chunk in chunks)),
        logprobs=list(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        policy_version=version,
        cached_tokens=max(chunk.cached_tokens for chunk in chunks),
    )
