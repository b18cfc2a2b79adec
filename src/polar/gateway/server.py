"""The HTTP data plane: session keys → model calls in each provider's dialect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from aiohttp import web
from prometheus_client.metrics_core import Metric

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
from polar.engines.base import Engine, ModelInfo, WeightUpdate
from polar.engines.pausable import PausableEngine
from polar.errors import PolarError
from polar.gateway.answering import (
    Handler,
    answering,
    by_claim,
    encoded,
    engine_errors,
    finished,
    fixed,
    go_on,
    json_answer,
    kept_alive,
    unknown_route,
)
from polar.gateway.call import ModelCall, Send, calls_for
from polar.gateway.canonical import in_call_order
from polar.gateway.chat_source import ChatSource
from polar.gateway.connection import Connection
from polar.gateway.metrics import GatewayMetrics, Load
from polar.gateway.quota import HeldRequest, memory_of_calls
from polar.gateway.request_body import read_body
from polar.gateway.request_coalescer import InFlight, fingerprint
from polar.gateway.session import Session, SessionGrant, new_key
from polar.gateway.sessions import Sessions
from polar.gateway.source import Source
from polar.gateway.token_source import TokenSource
from polar.models.chat import ChatRequest
from polar.models.completion import Completion
from polar.models.policy import PauseMode
from polar.models.session import AgentEnd, Progress
from polar.rendering.base import Renderer
from polar.telemetry import logs, tracing

__all__ = ["Gateway", "SessionGrant", "new_key"]

_KEY_PREFIX = "/k/{session_key}"
"""Stands before any address, for harnesses that can be given a base URL but no key."""
_DEFAULT_DIALECT = "openai_chat"
"""Whose error shape is used at addresses no dialect has."""
_BACKLOG = 128
"""Connections that wait to be accepted."""
_SESSION = web.RequestKey("session", Session)
"""The session of a request, once its key is read."""


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
        self._source: Source = TokenSource(engine, renderer, model) if renderer else ChatSource(engine, model)
        self._model = model
        self._created = int(time.time())
        self._sessions = Sessions(settings, self._watch)
        self.metrics = GatewayMetrics(self._load)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        app = web.Application()
        dialects: list[Dialect] = [plugins.load("dialects", name)() for name in plugins.names("dialects")]
        dialects.sort(key=lambda dialect: dialect.name != _DEFAULT_DIALECT)
        shared: dict[tuple[str, str], list[tuple[Dialect, Handler]]] = {}
        for dialect in dialects:
            for route in dialect.routes:
                at = shared.setdefault((route.method, route.path), [])
                at.append((dialect, self._handler(dialect, route)))
        for (method, path), handlers in shared.items():
            for at_key in ("", _KEY_PREFIX):
                app.router.add_route(method, f"{at_key}{path}", by_claim(handlers), expect_handler=go_on)
        unknown = [(dialect, self._answering(dialect, unknown_route)) for dialect in dialects]
        app.router.add_route("*", "/{path:.*}", by_claim(unknown), expect_handler=go_on)
        # Handlers are cancelled when their client goes away: that is what aborts the engine's work.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            self._listener = await self._listen(self._runner)
        except OSError as error:
            await self._runner.cleanup()
            raise PolarError(
                f"the gateway cannot listen on {self.host}:{self._settings.port}: {error.strerror or error}",
                hint="set gateway.port to another port, or to 0 for any free one",
            ) from None
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _listen(self, runner: web.AppRunner) -> asyncio.Server:
        server = runner.server
        assert server is not None, "set up above"
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(server, self._settings), self.host, self._settings.port, backlog=_BACKLOG
        )

    async def close(self) -> None:
        """End every session and stop listening."""
        for session in self._sessions:
            await self._sessions.close(session.grant.session_id)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def open_session(self, grant: SessionGrant) -> None:
        """From now on the grant's key opens the session's model calls."""
        self._sessions.open(grant, is_paused=self.is_paused)

    def progress(self, session_id: str) -> Progress:
        """What the session has done so far; nothing for one that was never opened."""
        return self._sessions.progress(session_id)

    async def budget_spent(self, session_id: str) -> tuple[AgentEnd, str]:
        """Return once a budget of the session is used up: how its agent ends, and which budget it was."""
        session = self._sessions.get(session_id)
        await session.budget_spent.wait()
        return AgentEnd.TIMEOUT if session.clock.is_spent else AgentEnd.BUDGET, session.spent_reason

    @property
    def is_paused(self) -> bool:
        return self._engine.is_paused

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing more; calls wait, and no session's time runs, until `resume`."""
        for session in self._sessions:
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
        return (await self._engine.model_info()).policy_version

    async def metric_families(self) -> Iterable[Metric]:
        return list(self.metrics.registry.collect())

    def _start_clocks(self) -> None:
        for session in self._sessions:
            session.clock.resume()

    async def close_session(self, session_id: str) -> None:
        """Abort what is in flight; later calls are told that the session has ended."""
        await self._sessions.close(session_id)

    def _handler(self, dialect: Dialect, route: Route) -> Handler:
        match route.action:
            case Action.COMPLETE:
                return self._answering(dialect, lambda request: self._complete(dialect, route, request))
            case Action.COUNT_TOKENS:
                return self._answering(dialect, lambda request: self._count_tokens(dialect, route, request))
            case Action.LIST_MODELS:
                return self._answering(dialect, lambda request: self._list_models(dialect, request))
            case Action.SHOW_MODEL:
                return self._answering(dialect, lambda request: self._show_model(dialect, request))
            case Action.FIXED:
                return fixed(route.fixed or HttpAnswer(200))

    def _answering(self, dialect: Dialect, handle: Handler) -> Handler:
        return answering(dialect, handle, self._refused)

    def _refused(self, dialect: Dialect, request: web.Request, error: RequestRefused) -> None:
        self.metrics.refused(dialect.name, error.refusal)
        session = request.get(_SESSION)
        if session is not None:
            session.count_failure(error)

    def _load(self) -> Load:
        return Load(*self._sessions.load, is_paused=self.is_paused)

    def _watch(self, grant: SessionGrant, completion: Completion) -> None:
        self.metrics.recorded(completion)
        tracing.completion(
            completion, session_id=grant.session_id, model=self._model.name, parent=grant.traceparent
        )

    def _session_of(self, dialect: Dialect, request: web.Request) -> Session:
        key = request.match_info.get("session_key") or dialect.key(request.headers, request.query)
        session = request[_SESSION] = self._sessions.of_key(key)
        logs.note(session=session.grant.session_id)
        return session

    async def _list_models(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        self._session_of(dialect, request)
        return json_answer(dialect.models(self._model.name, self._model.max_context, self._created))

    async def _show_model(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session_of(dialect, request)
        self._refuse_other_models(session, request.match_info["model"])
        return json_answer(dialect.model(self._model.name, self._model.max_context, self._created))

    async def _count_tokens(self, dialect: Dialect, route: Route, request: web.Request) -> web.StreamResponse:
        session = self._session_of(dialect, request)
        with session.quota.request() as held:
            chat, _ = await self._asked(dialect, route, request, session, held)
            extension = session.find(chat, self._model.max_context)
            with engine_errors(session, self._model):
                count = await self._source.count(chat, extension)
        if count is None:
            raise RequestRefused(Refusal.UNKNOWN_ROUTE, "The engine behind this gateway cannot count tokens.")
        return json_answer(dialect.token_count(count))

    async def _asked(
        self, dialect: Dialect, route: Route, request: web.Request, session: Session, held: HeldRequest
    ) -> tuple[ChatRequest, bytes]:
        """What the client asks for, and the fingerprint by which a retry of it is known."""
        session.refuse_when_over()
        body = await read_body(request, self._settings, held)
        chat = self._chat_request(dialect, route, request, body, session)
        held.hold_more(memory_of_calls(chat.messages))
        return chat, fingerprint(request.raw_path, body, request.headers)

    def _chat_request(
        self, dialect: Dialect, route: Route, request: web.Request, body: bytes, session: Session
    ) -> ChatRequest:
        """The request as it reads with the whole conversation before it; refused if not for our model."""
        asked = HttpRequest(
            *(route, body, request.match_info, request.query, request.headers),
            recall=session.conversations.recall,
        )
        chat = dialect.parse(asked)
        if hints := dialect.hints(asked):
            chat = replace(chat, hints=hints)
        tools = session.conversations.known(chat.tools)
        if tools is not chat.tools:
            chat = replace(chat, tools=tools)
        self._refuse_other_models(session, chat.model)
        return replace(chat, messages=in_call_order(chat.messages))

    async def _complete(self, dialect: Dialect, route: Route, request: web.Request) -> web.StreamResponse:
        session = self._session_of(dialect, request)
        with session.quota.request() as held:
            chat, asked = await self._asked(dialect, route, request, session, held)
            return await self._answer(dialect, request, chat, asked, session)

    async def _answer(
        self, dialect: Dialect, request: web.Request, chat: ChatRequest, asked: bytes, session: Session
    ) -> web.StreamResponse:
        coalescer = self._sessions.coalescer(session)
        in_flight = coalescer.join(asked, request.headers)
        if in_flight is None:
            in_flight = coalescer.launch(calls_for(session, chat, dialect.name), self._generate, asked)
        else:
            self.metrics.coalesced(dialect.name)
        with in_flight.followed():
            if not chat.stream:
                return await self._whole(dialect, request, chat, in_flight, session)
            try:
                await in_flight.accepted()
            except RequestRefused as error:
                if error.refusal not in dialect.told_in_stream:
                    raise
            return await self._stream(dialect, request, chat, in_flight, session)

    async def _generate(self, call: ModelCall, accept: Callable[[], None], send: Send) -> Answer:
        await call.prepare(self._source, self._model)
        accept()
        return await call.run(send)

    async def _whole(
        self, dialect: Dialect, request: web.Request, chat: ChatRequest, in_flight: InFlight, session: Session
    ) -> web.StreamResponse:
        with engine_errors(session, self._model):
            answers = await in_flight.answers()
        response = json_answer(
            dialect.respond_with_choices(self._identity(in_flight.calls[0]), chat, answers)
        )
        with suppress(ConnectionError):  # the client is gone; its retry gets the answer
            await response.prepare(request)
            await response.write_eof()
            in_flight.is_delivered = True
        return response

    async def _stream(
        self, dialect: Dialect, request: web.Request, chat: ChatRequest, in_flight: InFlight, session: Session
    ) -> web.StreamResponse:
        encoders = dialect.stream_choices(self._identity(in_flight.calls[0]), chat)
        response = web.StreamResponse(
            headers={
                "Content-Type": encoders[0].content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        with suppress(ConnectionError):  # the client is gone, and the call has recorded that
            await response.prepare(request)
            await response.write(b"".join(encoder.start() for encoder in encoders))
            await self._stream_answers(dialect, request, response, encoders, in_flight, session)
            await response.write_eof()
        return response

    async def _stream_answers(
        self,
        dialect: Dialect,
        request: web.Request,
        response: web.StreamResponse,
        encoders: Sequence[StreamEncoder],
        in_flight: InFlight,
        session: Session,
    ) -> None:
        async with kept_alive(response, encoders[0], self._settings.keepalive_seconds):
            try:
                with engine_errors(session, self._model):
                    async for deltas in in_flight.deltas():
                        await response.write(
                            b"".join(encoded(encoders[choice], delta) for choice, delta in deltas)
                        )
                    answers = await in_flight.answers()
            except RequestRefused as error:
                self._refused(dialect, request, error)
                await response.write(encoders[0].error(error))
            else:
                await response.write(b"".join(map(finished, encoders, answers)))
                in_flight.is_delivered = True

    def _refuse_other_models(self, session: Session, name: str) -> None:
        if name != self._model.name and not session.grant.serves_any_name:
            raise RequestRefused(
                Refusal.UNKNOWN_MODEL,
                f"The model {name!r} does not exist; this session serves {self._model.name!r}.",
                field="model",
            )

    def _identity(self, call: ModelCall) -> CallIdentity:
        return CallIdentity(call.id, self._model.name, int(call.started_at))
