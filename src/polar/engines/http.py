"""What clients of engines over HTTP share: connections, events, and patience before the first of them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from itertools import chain, groupby
from typing import Any, ClassVar
from uuid import uuid4

import orjson

from polar.engines.base import (
    ChatCall,
    ContextOverflow,
    Engine,
    EngineDown,
    EngineError,
    GenerateRequest,
    Mode,
    RequestUnfit,
    TokenChunk,
    Unconstrainable,
)
from polar.engines.connections import Connections, Disconnected, Response
from polar.errors import Backoff
from polar.models.chat import ChatRequest, Message, Role, Sampling, ToolDefinition
from polar.models.session import PROCESSED, RAW
from polar.telemetry.readings import Readings, read

log = logging.getLogger(__name__)

ATTEMPTS = 5
FIRST_BACKOFF_SECONDS = 0.1
"""Doubles with each attempt: at most 1.5 s in all, enough for an engine's restart of its listener, short of
any harness's patience."""
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 1_800.0
"""A request may wait long in the engine's queue or through a weight update; a session's own budget
ends it earlier. This only frees connections whose peer vanished without a word."""
QUESTION_SECONDS = 30.0
"""For questions that an engine answers without sampling."""
READINGS_SECONDS = 2.0
"""For an engine's page of metrics: whoever waits for ours has a limit too."""
ORDER_SECONDS = 1_200.0
"""For pauses, which may wait for what is being sampled, and for weights, which may be large."""
DRAIN_SECONDS = 0.5
"""How long the end of a stream may lag behind its last event before its connection is given up."""

BUSY = frozenset({429, 502, 503, 504})
"""Answers after which the same request may succeed: nothing was sampled."""
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
"""How the engines' versions tell the length of a prompt that, or whose answer, does not fit."""
_DONE = b"[DONE]"
"""What stands in the last event of a stream instead of JSON."""
PROBE_TEMPERATURES = (1.0, 2.0)
"""What an engine that does not say so is asked at, to see whether temperature counts in its logprobs."""
PROBE_TOLERANCE = 0.05
"""Logprobs of one token that are closer than this are the same: engines round, and add up in any order."""
_PROBE_TOOL = ToolDefinition("probe", "Does nothing.", {"type": "object", "properties": {}})


class NotAccepted(RequestUnfit):
    """The engine refuses the request as it stands: the same again will be refused again."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """What the engine says, without where it is."""


class HttpEngine(Engine):
    """An engine at a URL."""

    requirement: ClassVar[str]
    """What the server must be for its tokens to be usable: the hint when the start-up check fails."""

    chat_requirement: ClassVar[str]
    """What the server must be for chat mode: the hint when its check fails."""

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
        self._logprobs_mode: str | None = None
        """What `check` has found out."""
        self.policy_version = 0
        """Stamped on tokens, as they come, when the server does not name the version itself."""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections = Connections(
            self.url, self._headers, connect_seconds=CONNECT_SECONDS, silence_seconds=SILENCE_SECONDS
        )

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        """Sample one token: whether ids and logprobs come back shows only in an answer."""
        requirement = self.requirement if mode is Mode.TOKENS else self.chat_requirement
        try:
            problem = await (self._try_tokens() if mode is Mode.TOKENS else self._try_chat())
        except EngineDown:
            raise
        except EngineError as error:
            raise EngineError(
                f"the engine at {self.url} cannot be used: {error}", hint=f"it must be {requirement}"
            ) from error
        if problem is not None:
            raise EngineError(
                f"the engine at {self.url} cannot be used: {problem}", hint=f"it must be {requirement}"
            )
        self._logprobs_mode = await self._shown_logprobs_mode()
        if mode is Mode.CHAT:
            await self._try_tools()

    async def _try_tokens(self) -> str | None:
        """What is wrong with a sampled token, if anything."""
        async with aclosing(self.generate(_probe(temperature=1.0))) as chunks:
            sampled = sum([len(chunk.ids) async for chunk in chunks])
        return None if sampled else "it samples without returning token ids"

    async def _shown_logprobs_mode(self) -> str | None:
        """Of which distribution logprobs are: the likeliest token is the same at any temperature, and its
        logprob is too where temperature does not count."""
        try:
            cool, hot = [await self._likeliest(_probe(each)) for each in PROBE_TEMPERATURES]
        except EngineDown:
            raise
        except (EngineError, LookupError, TypeError, ValueError, AttributeError) as error:
            log.info("the engine at %s does not show of what its logprobs are: %r", self.url, error)
            return None
        if abs(cool - hot) > PROBE_TOLERANCE:
            return PROCESSED
        # Of a token that is certain, both are 0.
        return RAW if cool < -PROBE_TOLERANCE else None

    async def _likeliest(self, probe: GenerateRequest) -> float:
        """The logprob of the token that most probably follows the prompt, as a session would get it."""
        raise EngineError(f"{type(self).__name__} shows only what it samples")

    async def _try_chat(self, *tools: ToolDefinition) -> str | None:
        """What is wrong with a short answer that the server renders the prompt of; None: nothing."""
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=1)
        chat = ChatRequest("", (Message(Role.USER, "Hi"),), tools)
        call = ChatCall(f"check-{uuid4().hex}", chat, sampling)
        async with aclosing(self.chat(call)) as chunks:
            return [chunk.untrainable async for chunk in chunks][-1]

    async def _try_tools(self) -> None:
        """Whether the server reads tool calls out of what the model says; agents without tools do without."""
        try:
            await self._try_chat(_PROBE_TOOL)
        except NotAccepted as error:
            log.warning("the engine at %s refuses requests with tools: %s", self.url, error)

    async def tokenize(self, text: str) -> list[int] | None:
        body = {"prompt": text, "add_special_tokens": False}
        status, answer = await self._ask("POST", "/tokenize", body)
        if status != 200:
            return None
        try:
            return [int(id) for id in orjson.loads(answer)["tokens"]]
        except (ValueError, KeyError, TypeError):
            return None

    async def readings(self) -> dict[str, Readings | None]:
        try:
            status, page = await self._ask("GET", "/metrics", seconds=READINGS_SECONDS)
        except EngineDown:
            return {self.url: None}
        return {self.url: read(page.decode(errors="replace")) if status == 200 else Readings()}

    async def close(self) -> None:
        self._connections.close()

    async def _served_model(self) -> tuple[dict[str, Any], str, int]:
        """The list of models as the server gives it, and the first one's name and context."""
        document = await self._get("/v1/models")
        try:
            entry = document["data"][0]
            return document, str(entry["id"]), int(entry["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"the engine at {self.url} lists no model with a max_model_len",
                hint=f"it must be {self.requirement}; for another server say --engine-kind",
            ) from error

    async def _get(self, path: str, *, older: str | None = None) -> dict[str, Any]:
        """The object at a path, or at the one it has on older servers; EngineDown if there is none (yet)."""
        status, answer = await self._ask("GET", path)
        if status == 404 and older is not None:
            return await self._get(older)
        if status != 200:
            raise EngineDown(f"the engine at {self.url} answers {status} to {path}: {reason_in(answer)}")
        try:
            document = orjson.loads(answer)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            raise EngineError(
                f"the engine at {self.url} answers {path} with no JSON object",
                hint=f"it must be {self.requirement}",
            )
        return document

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
        """Have something done that may take long; EngineError if it is not, with what it needs if unknown."""
        status, answer = await self._ask("POST", path, body, seconds=ORDER_SECONDS)
        if status == 404:
            raise EngineError(f"the engine at {self.url} has no {path.partition('?')[0]}", hint=needs)
        if status != 200:
            raise EngineError(f"the engine at {self.url} answers {status} to {path}: {reason_in(answer)}")
        return answer

    async def _document(self, path: str, body: Any) -> dict[str, Any]:
        """A generation in one piece; trouble with an engine that is down or busy is tried again.

        Cancelling this closes the connection, which aborts the request.
        """
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        patience = _Patience()
        while True:
            try:
                async with self._connections.request("POST", path, data) as response:
                    answer = await response.read()
                if response.status != 200:
                    raise refusal(self.url, response.status, reason_in(answer))
                return _object(answer)
            except EngineDown as error:
                problem = error
            except Disconnected as error:
                problem = EngineDown(f"the engine at {self.url} cannot be reached: {error}")
            await patience.wait(problem)

    async def _events(self, path: str, body: Any) -> AsyncGenerator[Iterator[dict[str, Any]], None]:
        """The events of a generation, or its one document where the server does not stream.

        Those that have arrived at once come at once, to be read before the next.

        Trouble before the first one is tried again, later trouble is not.

        Closing the iterator closes the connection, which aborts the request.
        """
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        patience = _Patience()
        while True:
            has_begun = False
            try:
                async with self._connections.request("POST", path, data) as response:
                    if response.status != 200:
                        raise refusal(self.url, response.status, reason_in(await response.read()))
                    if response.content_type != "text/event-stream":
                        yield iter([_object(await response.read())])
                        return
                    async with aclosing(_parsed(response)) as arrivals:
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
            await patience.wait(problem)


class _Patience:
    """How long a request waits for an engine that is down or busy."""

    def __init__(self) -> None:
        self._pauses = Backoff(FIRST_BACKOFF_SECONDS, CONNECT_SECONDS, attempts=ATTEMPTS).pauses()

    async def wait(self, problem: EngineDown) -> None:
        """Return when it is time to try again; raise the problem once there is no more patience."""
        pause = next(self._pauses, None)
        if pause is None:
            raise problem
        await asyncio.sleep(pause)


async def _parsed(response: Response) -> AsyncGenerator[Iterator[dict[str, Any]], None]:
    """The JSON of the server-sent events up to [DONE]. Lines may be longer than any read buffer."""
    tail = b""
    while piece := await response.piece():
        *lines, tail = (tail + piece).split(b"\n")
        sent = [data for line in lines if line.startswith(b"data:") and (data := line[5:].strip())]
        is_done = _DONE in sent
        if is_done:
            del sent[sent.index(_DONE) :]
        if sent:
            yield map(_object, sent)
        if is_done:
            await _drain(response)
            return


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the engine's answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EngineError("the engine's answer is no JSON object")
    return value


async def _drain(response: Response) -> None:
    """Read a finished stream to its end, so that the next request can use its connection."""
    with suppress(Disconnected, TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            await response.read()


def refusal(url: str, status: int, reason: str) -> EngineError:
    """The error that an engine means by refusing a request before it sampled anything."""
    if status == 400 and any(words in reason.lower() for words in _OVERFLOW_WORDS):
        told = _PROMPT_LENGTH.search(reason)
        return ContextOverflow(reason, prompt_tokens=int(next(filter(None, told.groups()))) if told else None)
    if status in BUSY:
        return EngineDown(f"the engine at {url} answers {status}: {reason}")
    if status in (400, 422):
        return NotAccepted(f"the engine at {url} answers {status}: {reason}", reason=reason)
    return EngineError(f"the engine at {url} answers {status}: {reason}")


def reason_in(body: bytes) -> str:
    """The message in an error body of any of the shapes seen, else its beginning."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:300].decode("utf-8", "replace").strip() or "no reason given"
    if isinstance(document, dict):
        error = document.get("error")
        inner = error if isinstance(error, dict) else document
        message = inner.get("message") or inner.get("detail") or (error if isinstance(error, str) else None)
        code = inner.get("code")
        if message:
            return f"{message} [{code}]" if isinstance(code, str) else str(message)
    return body[:300].decode("utf-8", "replace")


def _probe(temperature: float) -> GenerateRequest:
    """Asks for one token, on behalf of no session."""
    sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, max_tokens=1)
    return GenerateRequest(f"check-{uuid4().hex}", [1], sampling)


def coalesce_chunks(read: Iterable[TokenChunk | None]) -> Iterator[TokenChunk]:
    """As few chunks as the versions of their tokens allow; an error comes after what was read before it."""
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
        yield _joined(list(alike), version)
    if failure is not None:
        raise failure


def _joined(chunks: list[TokenChunk], version: int) -> TokenChunk:
    if len(chunks) == 1:
        return chunks[0]
    return TokenChunk(
        ids=list(chain.from_iterable(chunk.ids for chunk in chunks)),
        logprobs=list(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        policy_version=version,
        cached_tokens=max(chunk.cached_tokens for chunk in chunks),
    )


@contextmanager
def guided(request: GenerateRequest) -> Iterator[None]:
    """An engine that does not accept a guided request is taken to refuse the guidance.

    Everything else in a request is the gateway's own and was accepted at start-up.
    """
    try:
        yield
    except NotAccepted as error:
        if request.constraint is None and not request.sampling.is_reshaped:
            raise
        raise Unconstrainable(f"the model cannot be held to what is asked: {error.reason}") from error
