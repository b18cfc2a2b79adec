"""The HTTP data plane: session keys → model calls in each provider's dialect."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from aiohttp import web

from polar import plugins
from polar.config.settings import GatewaySettings
from polar.dialects.base import (
    Action,
    Answer,
    CallIdentity,
    Dialect,
    HttpAnswer,
    HttpRequest,
    Refusal,
    RequestRefused,
    Route,
    StreamEncoder,
)
from polar.engines.base import ContextOverflow, Engine, EngineError, ModelInfo, Unconstrainable, WeightUpdate
from polar.engines.http import NotAccepted
from polar.engines.pausable import PausableEngine
from polar.errors import Conflict, NotFound, PolarError, Unavailable
from polar.gateway.call import ModelCall, Send
from polar.gateway.capture import CaptureError
from polar.gateway.chat_source import ChatSource
from polar.gateway.flights import Flight, Flights, fingerprint
from polar.gateway.session import Session, SessionGrant, context_overflow, new_key, session_ended
from polar.gateway.source import Source
from polar.gateway.token_source import TokenSource
from polar.models.chat import ChatRequest
from polar.models.policy import PauseMode
from polar.models.session import Progress
from polar.rendering.base import MessageDelta, Renderer

__all__ = ["Gateway", "SessionGrant", "new_key"]

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

K = TypeVar("K")
V = TypeVar("V")

_ENDED_SESSIONS = 10_000
"""How many ended sessions are remembered, to answer 410 instead of 401 and to report progress."""
_KEY_PREFIX = "/k/{session_key}"
"""Stands before any address, for harnesses that can be given a base URL but no key."""
_DEFAULT_DIALECT = "openai_chat"
"""Whose error shape is used at addresses no dialect has."""


class Gateway:
    """Serves every registered dialect; each key opens only its own session."""

    host: str
    port: int
    """The real port once started."""

    def __init__(
        self, settings: GatewaySettings, engine: Engine, renderer: Renderer | None, model: ModelInfo
    ) -> None:
        """Without a renderer the engine is asked in chat mode: it renders the prompts itself."""
        self.host, self.port = settings.host, settings.port
        self._settings = settings
        self._engine = engine = PausableEngine(engine)
        self._source: Source = TokenSource(engine, renderer) if renderer else ChatSource(engine, model)
        self._model = model
        self._created = int(time.time())
        self._by_key: dict[bytes, Session] = {}
        self._sessions: dict[str, Session] = {}
        self._flights: dict[str, Flights] = {}
        self._ended_keys: OrderedDict[bytes, None] = OrderedDict()
        self._ended: OrderedDict[str, Progress] = OrderedDict()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        app = web.Application(client_max_size=self._settings.max_body_bytes)
        dialects: list[Dialect] = [plugins.load("dialects", name)() for name in plugins.names("dialects")]
        dialects.sort(key=lambda dialect: dialect.name != _DEFAULT_DIALECT)
        shared: dict[tuple[str, str], list[tuple[Dialect, Handler]]] = {}
        for dialect in dialects:
            for route in dialect.routes:
                at = shared.setdefault((route.method, route.path), [])
                at.append((dialect, self._handler(dialect, route)))
        for (method, path), handlers in shared.items():
            app.router.add_route(method, path, _by_claim(handlers))
            app.router.add_route(method, f"{_KEY_PREFIX}{path}", _by_claim(handlers))
        unknown = [(dialect, _answering(dialect, _unknown_route)) for dialect in dialects]
        app.router.add_route("*", "/{path:.*}", _by_claim(unknown))
        # Handlers are cancelled when their client goes away: that is what aborts the engine's work.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise PolarError(
                f"the gateway cannot listen on {self.host}:{self._settings.port}: {error.strerror or error}",
                hint="set gateway.port to another port, or to 0 for any free one",
            ) from None
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """End every session and stop listening."""
        for session_id in list(self._sessions):
            await self.close_session(session_id)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open_session(self, grant: SessionGrant) -> None:
        if grant.session_id in self._sessions:
            raise Conflict(f"session {grant.session_id} is open already")
        session = Session(grant, is_paused=self.is_paused)
        self._flights[grant.session_id] = Flights(session, self._settings.replay_seconds)
        self._sessions[grant.session_id] = session
        self._by_key[_digest(grant.key)] = session

    def progress(self, session_id: str) -> Progress:
        """What the session has done so far; nothing for one that was never opened."""
        session = self._sessions.get(session_id)
        return session.progress if session else self._ended.get(session_id, Progress())

    async def budget_spent(self, session_id: str) -> None:
        """Return once a call of the session was refused because a budget of it is used up."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(f"session {session_id} is not open")
        await session.budget_spent.wait()

    def is_out_of_time(self, session_id: str) -> bool:
        """Whether an open session has used up its wall time."""
        session = self._sessions.get(session_id)
        return session is not None and session.clock.is_spent

    @property
    def is_paused(self) -> bool:
        return self._engine.is_paused

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing more; calls wait, and no session's time runs, until `resume`."""
        for session in self._sessions.values():
            session.clock.pause()
        try:
            await self._engine.pause(mode)
        except BaseException:
            self._start_clocks()
            raise

    async def resume(self) -> None:
        await self._engine.resume()
        self._start_clocks()

    async def update_weights(self, update: WeightUpdate) -> None:
        """Replace the weights, during a pause; EngineError if the old ones stay."""
        await self._engine.update_weights(update)

    async def policy_version(self) -> int:
        """Of the weights that the engine samples with."""
        return (await self._engine.model_info()).policy_version

    def _start_clocks(self) -> None:
        for session in self._sessions.values():
            session.clock.resume()

    async def close_session(self, session_id: str) -> None:
        """Abort what is in flight; later calls are told that the session has ended."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        try:
            await session.close()
        finally:
            self._sessions.pop(session_id, None)
            self._flights.pop(session_id, None)
            digest = _digest(session.grant.key)
            self._by_key.pop(digest, None)
            _remember(self._ended_keys, digest, None)
            _remember(self._ended, session_id, session.progress)

    def _handler(self, dialect: Dialect, route: Route) -> Handler:
        match route.action:
            case Action.COMPLETE:
                return _answering(dialect, lambda request: self._complete(dialect, route, request))
            case Action.COUNT_TOKENS:
                return _answering(dialect, lambda request: self._count_tokens(dialect, route, request))
            case Action.LIST_MODELS:
                return _answering(dialect, lambda request: self._list_models(dialect, request))
            case Action.SHOW_MODEL:
                return _answering(dialect, lambda request: self._show_model(dialect, request))
            case Action.FIXED:
                return _fixed(route.fixed or HttpAnswer(200))

    def _session_of(self, dialect: Dialect, request: web.Request) -> Session:
        key = request.match_info.get("session_key") or dialect.key(request.headers, request.query)
        if key is not None:
            digest = _digest(key)
            session = self._by_key.get(digest)
            # Compared as digests, in constant time, so that timing tells nothing of a key.
            if session is not None and hmac.compare_digest(_digest(session.grant.key), digest):
                if session.ended:
                    raise session_ended()
                return session
            if digest in self._ended_keys:
                raise session_ended()
        what = "No API key was given." if key is None else "Incorrect API key provided."
        raise RequestRefused(Refusal.UNKNOWN_KEY, f"{what} Use the key of a running Polar session.")

    async def _list_models(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        self._session_of(dialect, request)
        return _json(dialect.models(self._model.name, self._model.max_context, self._created))

    async def _show_model(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        self._session_of(dialect, request)
        self._refuse_other_models(request.match_info["model"])
        return _json(dialect.model(self._model.name, self._model.max_context, self._created))

    async def _count_tokens(self, dialect: Dialect, route: Route, request: web.Request) -> web.StreamResponse:
        session = self._session_of(dialect, request)
        chat = await self._chat_request(dialect, route, request, session)
        extension = session.conversations.find(chat.messages, chat.tools)
        with _engine_errors(session, self._model):
            count = await self._source.count(chat, extension)
        if count is None:
            raise RequestRefused(Refusal.UNKNOWN_ROUTE, "The engine behind this gateway cannot count tokens.")
        return _json(dialect.token_count(count))

    async def _chat_request(
        self, dialect: Dialect, route: Route, request: web.Request, session: Session
    ) -> ChatRequest:
        """The request as it reads with the whole conversation before it; refused if not for our model."""
        body = await self._body(request)
        asked = HttpRequest(route, body, request.match_info, request.query, request.headers)
        chat = dialect.parse(asked)
        if hints := dialect.hints(asked):
            chat = replace(chat, hints=hints)
        self._refuse_other_models(chat.model)
        if chat.continues is None:
            return chat
        before = session.conversations.turn(chat.continues)
        if before is None:
            raise RequestRefused(
                Refusal.UNKNOWN_RESPONSE, "The response to continue is not one of this session."
            )
        return replace(chat, messages=before.messages + chat.messages, continues=None)

    async def _complete(self, dialect: Dialect, route: Route, request: web.Request) -> web.StreamResponse:
        session = self._session_of(dialect, request)
        chat = await self._chat_request(dialect, route, request, session)
        flights = self._flights[session.grant.session_id]
        asked = fingerprint(request.path_qs, await request.read())
        flight = flights.join(asked, request.headers)
        if flight is None:
            flight = flights.launch(ModelCall(session, chat, dialect.name), self._fly, asked)
        with flight.followed():
            try:
                await flight.accepted()
            except RequestRefused as error:
                if not chat.stream or error.refusal not in dialect.told_in_stream:
                    raise
            if chat.stream:
                return await self._stream(dialect, request, chat, flight, session)
            return await self._whole(dialect, chat, flight, session)

    async def _fly(self, call: ModelCall, accept: Callable[[], None], send: Send) -> Answer:
        await call.prepare(self._source, self._model)
        accept()
        return await call.run(send)

    async def _whole(
        self, dialect: Dialect, chat: ChatRequest, flight: Flight, session: Session
    ) -> web.StreamResponse:
        with _engine_errors(session, self._model):
            answer = await flight.answer()
        return _json(dialect.respond(self._identity(flight.call), chat, answer))

    async def _stream(
        self, dialect: Dialect, request: web.Request, chat: ChatRequest, flight: Flight, session: Session
    ) -> web.StreamResponse:
        encoder = dialect.stream(self._identity(flight.call), chat)
        response = web.StreamResponse(
            headers={
                "Content-Type": encoder.content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        with suppress(ConnectionError):  # the client is gone, and the call has recorded that
            await response.prepare(request)
            await response.write(encoder.start())
            await self._stream_answer(response, encoder, flight, session)
            await response.write_eof()
        return response

    async def _stream_answer(
        self, response: web.StreamResponse, encoder: StreamEncoder, flight: Flight, session: Session
    ) -> None:
        async with _kept_alive(response, encoder, self._settings.keepalive_seconds):
            try:
                with _engine_errors(session, self._model):
                    async for deltas in flight.deltas():
                        await response.write(b"".join(_encoded(encoder, delta) for delta in deltas))
                    answer = await flight.answer()
            except RequestRefused as error:
                await response.write(encoder.error(error))
            else:
                if answer.stop_sequence is not None:
                    encoder.stop_sequence(answer.stop_sequence)
                await response.write(encoder.finish(answer.finish_reason, answer.usage))

    def _refuse_other_models(self, name: str) -> None:
        if name != self._model.name:
            raise RequestRefused(
                Refusal.UNKNOWN_MODEL,
                f"The model {name!r} does not exist; this session serves {self._model.name!r}.",
                field="model",
            )

    async def _body(self, request: web.Request) -> bytes:
        limit = self._settings.max_body_bytes
        try:
            if (request.content_length or 0) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise RequestRefused(
                Refusal.TOO_LARGE, f"The request body is larger than {limit} bytes."
            ) from None

    def _identity(self, call: ModelCall) -> CallIdentity:
        return CallIdentity(call.id, self._model.name, int(call.started_at))


def _answering(dialect: Dialect, handle: Handler) -> Handler:
    """A handler whose errors are told in the dialect's words."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handle(request)
        except RequestRefused as error:
            refused = error
        except ConnectionError:
            raise
        except Exception:
            # Not the path itself, which may hold a key.
            log.exception("%s %s failed", dialect.name, request.method)
            refused = _internal_error()
        told = dialect.error(refused)
        return _json(told.body, told.status, dict(told.headers))

    return answer


def _internal_error() -> RequestRefused:
    return RequestRefused(Refusal.INTERNAL, "The gateway failed to answer; its log says why.")


def _by_claim(handlers: Sequence[tuple[Dialect, Handler]]) -> Handler:
    """Of several dialects at one address, the one that claims the request; else the first."""
    if len(handlers) == 1:
        return handlers[0][1]

    async def answer(request: web.Request) -> web.StreamResponse:
        claiming = (handler for dialect, handler in handlers if dialect.claims(request.headers))
        return await next(claiming, handlers[0][1])(request)

    return answer


def _fixed(answer: HttpAnswer) -> Handler:
    async def handle(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=answer.status, body=answer.body, headers=dict(answer.headers))

    return handle


async def _unknown_route(request: web.Request) -> web.StreamResponse:
    raise RequestRefused(Refusal.UNKNOWN_ROUTE, f"Invalid URL ({request.method} {request.path})")


@contextmanager
def _engine_errors(session: Session, model: ModelInfo) -> Iterator[None]:
    """Engine trouble becomes a refusal; its details are for the log, not for the sandbox."""
    try:
        yield
    except ContextOverflow as error:
        raise context_overflow(model.max_context, error.prompt_tokens) from None
    except NotAccepted as error:
        log.warning("session %s: %s", session.grant.session_id, error)
        raise RequestRefused(
            Refusal.MALFORMED, f"The model's server does not take this request: {error.reason}"
        ) from error
    except Unconstrainable as error:
        raise RequestRefused(Refusal.MALFORMED, error.message) from error
    except EngineError as error:
        log.warning("session %s: %s", session.grant.session_id, error)
        if isinstance(error, Unavailable):
            raise RequestRefused(
                Refusal.ENGINE_DOWN, "The model is overloaded or not available right now: try again later."
            ) from error
        raise RequestRefused(Refusal.ENGINE_FAILED, "The model failed to answer.") from error
    except CaptureError as error:
        log.error("session %s: %s", session.grant.session_id, error)
        raise RequestRefused(Refusal.INTERNAL, "The completion could not be recorded.") from error
    except (RequestRefused, ConnectionError):
        raise
    except Exception as error:
        log.exception("session %s: a completion failed", session.grant.session_id)
        raise _internal_error() from error


@asynccontextmanager
async def _kept_alive(
    response: web.StreamResponse, encoder: StreamEncoder, seconds: float
) -> AsyncIterator[None]:
    """Sends the dialect's keep-alive all the while the block is at work."""

    async def tick() -> None:
        # A client that is gone cancels the handler itself; the ticker has nothing to add.
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(seconds)
                await response.write(encoder.keep_alive())

    ticker = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)


def _encoded(encoder: StreamEncoder, delta: MessageDelta) -> bytes:
    return b"".join(
        [
            encoder.reasoning(delta.reasoning) if delta.reasoning else b"",
            encoder.text(delta.content) if delta.content else b"",
            *(encoder.tool_call(call) for call in delta.tool_calls),
        ]
    )


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _digest(key: str) -> bytes:
    # A header may hold any bytes; those that are no text come as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    while len(memory) > _ENDED_SESSIONS:
        memory.popitem(last=False)
