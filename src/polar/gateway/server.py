"""The HTTP data plane: session keys → model calls in each provider's dialect."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from aiohttp import web
from prometheus_client.metrics_core import Metric

from polar.config import plugins
from polar.config.settings import GatewaySettings
from polar.dialects.base import (
    Answer,
    CallIdentity,
    Dialect,
    HttpAnswer,
    HttpRequest,
    Refusal,
    RequestRefused,
    Route,
    RouteAction,
    StreamEncoder,
)
from polar.engines.base import (
    ContextOverflow,
    Engine,
    EngineError,
    ModelInfo,
    Unconstrainable,
    WeightUpdate,
)
from polar.engines.http import NotAccepted
from polar.engines.pausable import PausableEngine
from polar.errors import PolarError, Unavailable
from polar.gateway.call import ModelCall
from polar.gateway.canonical import in_call_order
from polar.gateway.http import ClientConnection, go_on, json_answer, kept_alive, read_body
from polar.gateway.metrics import GatewayMetrics
from polar.gateway.quota import HeldRequest, memory_of_calls
from polar.gateway.request_coalescer import Fingerprint, InFlight, fingerprint
from polar.gateway.session import Session, SessionGrant, SessionRegistry, context_overflow, new_key
from polar.gateway.source import AnswerSource, ChatSource, TokenSource
from polar.models.chat import ChatRequest
from polar.models.completion import Completion
from polar.models.policy import PauseMode
from polar.models.session import AgentEnd, Progress, ReplayReport
from polar.recordings.capture import CaptureError
from polar.rendering.base import MessageDelta, Renderer
from polar.telemetry import logs, tracing

__all__ = ["Gateway", "SessionGrant", "new_key"]

log = logging.getLogger(__name__)

_KEY_PREFIX = "/k/{session_key}"
"""Stands before any address, for harnesses that can be given a base URL but no key."""
_DEFAULT_DIALECT = "openai_chat"
"""The dialect in whose shape errors are told at addresses no dialect has."""
_BACKLOG = 128
"""Connections that wait to be accepted."""
_SESSION = web.RequestKey("session", Session)
"""The session of a request, once its key is read."""


class Gateway:
    """Serves every registered dialect; each key opens only its own session."""

    host: str
    port: int
    """The real port once started."""
    _runner: web.AppRunner
    _listener: asyncio.Server

    def __init__(
        self, settings: GatewaySettings, engine: Engine, renderer: Renderer | None, model: ModelInfo
    ) -> None:
        """Without a renderer the engine is asked in chat mode: it renders the prompts itself."""
        self.host, self.port = settings.host, settings.port
        self._settings = settings
        self._engine = door = PausableEngine(engine)
        self._source: AnswerSource = (
            TokenSource(door, renderer, model) if renderer else ChatSource(door, model)
        )
        self._model = model
        self._created = int(time.time())
        self._sessions = SessionRegistry(settings, self._watch)
        self.metrics = GatewayMetrics(
            lambda: len(self._sessions),
            lambda: sum(len(session.calls) for session in self._sessions),
            lambda: self.is_paused,
        )

    async def __aenter__(self) -> Self:
        app = web.Application()
        dialects: list[Dialect] = [plugins.load("dialects", name)() for name in plugins.names("dialects")]
        dialects.sort(key=lambda dialect: dialect.name != _DEFAULT_DIALECT)
        shared: dict[tuple[str, str], list[tuple[Dialect, Route | None]]] = {}
        for dialect in dialects:
            for route in dialect.routes:
                shared.setdefault((route.method, route.path), []).append((dialect, route))
        for (method, path), routes in shared.items():
            for at_key in ("", _KEY_PREFIX):
                app.router.add_route(method, f"{at_key}{path}", self._handler(routes), expect_handler=go_on)
        unknown = self._handler([(dialect, None) for dialect in dialects])
        app.router.add_route("*", "/{path:.*}", unknown, expect_handler=go_on)
        # Handlers are cancelled when their client goes away: that is what aborts the engine's work.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "set up above"
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: ClientConnection(server, self._settings), self.host, self.port, backlog=_BACKLOG
            )
        except OSError as error:
            await self._runner.cleanup()
            raise PolarError(
                f"the gateway cannot listen on {self.host}:{self.port}: {error.strerror or error}",
                hint="set gateway.port to another port, or to 0 for any free one",
            ) from None
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every session and stop listening."""
        for session in self._sessions:
            await self._sessions.close(session.grant.session_id)
        self._listener.close()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def open_session(self, grant: SessionGrant) -> None:
        """From now on the grant's key opens the session's model calls."""
        self._sessions.open(grant, is_paused=self.is_paused)

    def progress(self, session_id: str) -> Progress:
        """What the session has done so far; nothing for one that was never opened."""
        return self._sessions.progress(session_id)

    def has_lost_call(self, session_id: str) -> bool:
        """Whether an answer in the session, which is open, could not be recorded."""
        return self._sessions.get(session_id).has_lost_call

    def replay_report(self, session_id: str) -> ReplayReport | None:
        """How far the session, which is open, followed the recording that it began with, if it did."""
        playback = self._sessions.get(session_id).grant.playback
        return playback.report if playback is not None else None

    async def budget_spent(self, session_id: str) -> tuple[AgentEnd, str]:
        """Return once a budget of the session is used up: how its agent ends, and which budget it was."""
        session = self._sessions.get(session_id)
        await session.budget_spent.wait()
        return session.agent_end, session.spent_reason

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

    def _handler(
        self, routes: Sequence[tuple[Dialect, Route | None]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The dialect that claims a request answers it; where several share an address, else the first."""

        async def handle(request: web.Request) -> web.StreamResponse:
            claiming = (at for at in routes if at[0].claims(request.headers))
            dialect, route = next(claiming, routes[0])
            try:
                return await self._respond(dialect, route, request)
            except RequestRefused as error:
                refused = error
            except ConnectionError:
                raise
            except Exception:
                # Not the path itself, which may hold a key.
                log.exception("%s %s failed", dialect.name, request.method)
                refused = _internal_error()
            self._refused(dialect, request, refused)
            told = dialect.error(refused)
            return json_answer(told.body, told.status, dict(told.headers))

        return handle

    async def _respond(
        self, dialect: Dialect, route: Route | None, request: web.Request
    ) -> web.StreamResponse:
        if route is None:
            raise RequestRefused(Refusal.UNKNOWN_ROUTE, f"Invalid URL ({request.method} {request.path})")
        if route.action is RouteAction.FIXED:
            fixed = route.fixed or HttpAnswer(200)
            return web.Response(status=fixed.status, body=fixed.body, headers=dict(fixed.headers))
        key = request.match_info.get("session_key") or dialect.key(request.headers, request.query)
        session = request[_SESSION] = self._sessions.of_key(key)
        logs.note(session=session.grant.session_id)
        shown = self._model.name, self._model.max_context, self._created
        match route.action:
            case RouteAction.COMPLETE:
                return await self._complete(dialect, route, request, session)
            case RouteAction.COUNT_TOKENS:
                return await self._count_tokens(dialect, route, request, session)
            case RouteAction.LIST_MODELS:
                return json_answer(dialect.models(*shown))
            case RouteAction.SHOW_MODEL:
                with session.quota.request() as held:
                    asked = await self._asked(route, request, session, held)
                    self._refuse_other_models(session, dialect.shown(asked))
                return json_answer(dialect.model(*shown))

    def _refused(self, dialect: Dialect, request: web.Request, error: RequestRefused) -> None:
        self.metrics.refused(dialect.name, error.refusal)
        session = request.get(_SESSION)
        if session is not None:
            session.count_failure(error)

    def _watch(self, grant: SessionGrant, completion: Completion) -> None:
        if completion.is_replayed:
            return  # It was counted where it was sampled.
        self.metrics.recorded(completion)
        tracing.completion(
            completion, session_id=grant.session_id, model=self._model.name, parent=grant.traceparent
        )

    async def _count_tokens(
        self, dialect: Dialect, route: Route, request: web.Request, session: Session
    ) -> web.StreamResponse:
        with session.quota.request() as held:
            chat, _ = await self._read(dialect, route, request, session, held)
            extension = session.find(chat, self._model.max_context)
            with _engine_errors(session, self._model):
                count = await self._source.count(chat, extension)
        if count is None:
            raise RequestRefused(Refusal.UNKNOWN_ROUTE, "The engine behind this gateway cannot count tokens.")
        return json_answer(dialect.token_count(count))

    async def _read(
        self, dialect: Dialect, route: Route, request: web.Request, session: Session, held: HeldRequest
    ) -> tuple[ChatRequest, Fingerprint]:
        """The request as it reads with the whole conversation before it, refused if not for our model; and
        the fingerprint by which a retry of it is known."""
        session.refuse_when_over()
        asked = await self._asked(route, request, session, held)
        chat = dialect.parse(asked)
        self._refuse_other_models(session, chat.model)
        chat = replace(
            chat,
            hints=dialect.hints(request.headers),
            tools=session.conversations.known(chat.tools),
            messages=in_call_order(chat.messages),
        )
        held.hold(held.size + memory_of_calls(chat.messages))
        return chat, fingerprint(request.raw_path, asked.body, request.headers)

    async def _asked(
        self, route: Route, request: web.Request, session: Session, held: HeldRequest
    ) -> HttpRequest:
        body = await read_body(request, self._settings, held)
        recall = session.conversations.recall
        return HttpRequest(route, body, request.match_info, request.query, request.headers, recall=recall)

    async def _complete(
        self, dialect: Dialect, route: Route, request: web.Request, session: Session
    ) -> web.StreamResponse:
        with session.quota.request() as held:
            chat, asked = await self._read(dialect, route, request, session, held)
            session.refuse_when_over()  # It may have been closed meanwhile.
            in_flight = session.coalescer.join(asked, request.headers)
            if in_flight is None:
                ordinals = enumerate(session.begin_calls(chat.choices))
                calls = [
                    ModelCall(session, self._source, chat, dialect.name, ordinal, choice)
                    for choice, ordinal in ordinals
                ]
                in_flight = session.coalescer.launch(calls, asked)
            else:
                self.metrics.coalesced(dialect.name)
            with in_flight.followed():
                if not chat.stream:
                    return await self._whole(dialect, request, chat, in_flight)
                try:
                    await in_flight.accepted()
                except RequestRefused as error:
                    if error.refusal not in dialect.told_in_stream:
                        raise
                return await self._stream(dialect, request, chat, in_flight)

    async def _whole(
        self, dialect: Dialect, request: web.Request, chat: ChatRequest, in_flight: InFlight
    ) -> web.StreamResponse:
        with _engine_errors(request[_SESSION], self._model):
            answers = await in_flight.answers()
        response = json_answer(dialect.respond(self._identity(in_flight.calls[0]), chat, answers))
        with suppress(ConnectionError):  # the client is gone; its retry gets the answer
            await response.prepare(request)
            await response.write_eof()
            in_flight.is_delivered = True
        return response

    async def _stream(
        self, dialect: Dialect, request: web.Request, chat: ChatRequest, in_flight: InFlight
    ) -> web.StreamResponse:
        encoders = dialect.stream(self._identity(in_flight.calls[0]), chat)
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
            async with kept_alive(response, encoders[0], self._settings.keepalive_seconds):
                try:
                    with _engine_errors(request[_SESSION], self._model):
                        async for deltas in in_flight.deltas():
                            new = (_encoded(encoders[choice], delta) for choice, delta in deltas)
                            await response.write(b"".join(new))
                        answers = await in_flight.answers()
                except RequestRefused as error:
                    self._refused(dialect, request, error)
                    await response.write(encoders[0].error(error))
                else:
                    await response.write(b"".join(map(_finished, encoders, answers)))
                    in_flight.is_delivered = True
            await response.write_eof()
        return response

    def _refuse_other_models(self, session: Session, name: str) -> None:
        if name != self._model.name and not session.grant.serves_any_name:
            raise RequestRefused(
                Refusal.UNKNOWN_MODEL,
                f"The model {name!r} does not exist; this session serves {self._model.name!r}.",
                field="model",
            )

    def _identity(self, call: ModelCall) -> CallIdentity:
        return CallIdentity(call.id, self._model.name, int(call.started_at))


def _internal_error() -> RequestRefused:
    return RequestRefused(Refusal.INTERNAL, "The gateway failed to answer; its log says why.")


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
        session.has_lost_call = True
        log.error("session %s: %s", session.grant.session_id, error)
        raise RequestRefused(Refusal.INTERNAL, "The completion could not be recorded.") from error
    except (RequestRefused, ConnectionError):
        raise
    except Exception as error:
        log.exception("session %s: a completion failed", session.grant.session_id)
        raise _internal_error() from error


def _encoded(encoder: StreamEncoder, delta: MessageDelta) -> bytes:
    return b"".join(
        [
            encoder.reasoning(delta.reasoning) if delta.reasoning else b"",
            encoder.text(delta.content) if delta.content else b"",
            *(encoder.tool_call(call) for call in delta.tool_calls),
            encoder.logprobs(delta.logprobs) if delta.logprobs else b"",
        ]
    )


def _finished(encoder: StreamEncoder, answer: Answer) -> bytes:
    return encoder.finish(answer.finish_reason, answer.usage, answer.stop_sequence)
