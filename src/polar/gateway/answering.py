"""How the gateway answers over HTTP: by dialect, in the dialect's words, alive while it waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from aiohttp import web

from polar.dialects.base import Answer, Dialect, HttpAnswer, Refusal, RequestRefused, StreamEncoder
from polar.engines.base import ContextOverflow, EngineError, ModelInfo, Unconstrainable
from polar.engines.http import NotAccepted
from polar.errors import Unavailable
from polar.gateway.session import Session, context_overflow
from polar.recordings.capture import CaptureError
from polar.rendering.base import MessageDelta

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


Refused = Callable[[Dialect, web.Request, RequestRefused], None]
"""Told of every request that is refused."""


def answering(dialect: Dialect, handle: Handler, tell: Refused) -> Handler:
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
            refused = internal_error()
        tell(dialect, request, refused)
        told = dialect.error(refused)
        return json_answer(told.body, told.status, dict(told.headers))

    return answer


async def go_on(request: web.Request) -> None:
    """Ask a client that waits for it to send its body; no other expectation is known, or does harm."""
    with suppress(ConnectionError):  # it is gone, as its handler will notice
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # else aiohttp takes the answer itself for sent


def internal_error() -> RequestRefused:
    return RequestRefused(Refusal.INTERNAL, "The gateway failed to answer; its log says why.")


def by_claim(handlers: Sequence[tuple[Dialect, Handler]]) -> Handler:
    """Of several dialects at one address, the one that claims the request; else the first."""
    if len(handlers) == 1:
        return handlers[0][1]

    async def answer(request: web.Request) -> web.StreamResponse:
        claiming = (handler for dialect, handler in handlers if dialect.claims(request.headers))
        return await next(claiming, handlers[0][1])(request)

    return answer


def fixed(answer: HttpAnswer) -> Handler:
    async def handle(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=answer.status, body=answer.body, headers=dict(answer.headers))

    return handle


async def unknown_route(request: web.Request) -> web.StreamResponse:
    raise RequestRefused(Refusal.UNKNOWN_ROUTE, f"Invalid URL ({request.method} {request.path})")


@contextmanager
def engine_errors(session: Session, model: ModelInfo) -> Iterator[None]:
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
        raise internal_error() from error


@asynccontextmanager
async def kept_alive(
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


def encoded(encoder: StreamEncoder, delta: MessageDelta) -> bytes:
    return b"".join(
        [
            encoder.reasoning(delta.reasoning) if delta.reasoning else b"",
            encoder.text(delta.content) if delta.content else b"",
            *(encoder.tool_call(call) for call in delta.tool_calls),
            encoder.logprobs(delta.logprobs) if delta.logprobs else b"",
        ]
    )


def finished(encoder: StreamEncoder, answer: Answer) -> bytes:
    if answer.stop_sequence is not None:
        encoder.stop_sequence(answer.stop_sequence)
    return encoder.finish(answer.finish_reason, answer.usage)


def json_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
