"""Errors as the control plane answers them: always a `Problem`, always one line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from polar.errors import Conflict, InvalidInput, NotFound, PolarError, Unavailable, finding
from polar.models.views import Problem
from polar.rollout.dashboard.files import not_found

log = logging.getLogger(__name__)

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "The request cannot be followed; `error` says why."},
    "5XX": {"model": Problem, "description": "The server cannot answer; trying again may help."},
}
"""For the OpenAPI document of every route."""

_KINDS: tuple[tuple[type[PolarError], int, str], ...] = (
    (InvalidInput, 400, "invalid_input"),
    (NotFound, 404, "not_found"),
    (Conflict, 409, "conflict"),
    (Unavailable, 503, "unavailable"),
)

_CODES = {401: "unauthorized", 403: "forbidden", 404: "not_found", 413: "too_large"}


def problem(status: int, code: str, error: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(Problem(error=error, code=code).model_dump(), status, headers)


def answer_problems(app: FastAPI) -> None:
    """Turn every error that a route can raise into a `Problem`."""
    app.add_exception_handler(PolarError, _polar_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _hung_up)
    app.add_exception_handler(UnicodeEncodeError, _not_storable)
    app.add_exception_handler(OverflowError, _not_storable)
    app.add_exception_handler(Exception, _unexpected)


def as_problem(error: PolarError) -> Problem:
    """An error as one part of an answer that holds others too."""
    return Problem(error=str(error), code=_kind(error)[1])


def status_of(error: PolarError) -> int:
    """The HTTP status that an error stands for."""
    return _kind(error)[0]


async def _not_storable(_request: Request, _error: Exception) -> JSONResponse:
    """JSON can hold half a character and numbers without end; no database stores either."""
    what = "text that is not Unicode or a number beyond 64 bits"
    return problem(400, "invalid_input", f"the request holds {what}, which cannot be stored")


async def _polar_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PolarError)
    status, code = _kind(error)
    if status == 500:
        log.error("request failed: %s", error)
    return problem(status, code, str(error))


def _kind(error: PolarError) -> tuple[int, str]:
    for kind, status, code in _KINDS:
        if isinstance(error, kind):
            return status, code
    return 500, "internal"


async def _invalid_request(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return problem(400, "invalid_input", _explain(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and "text/html" in request.headers.get("accept", ""):
        return not_found()
    code = _CODES.get(error.status_code, "invalid_input")
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return problem(error.status_code, code, detail, dict(error.headers or {}))


async def _hung_up(request: Request, _error: Exception) -> JSONResponse:
    log.info("%s %s: the caller hung up; nothing was stored", request.method, request.url.path)
    return problem(400, "invalid_input", "the request was not sent whole")


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, "internal", "the server failed on this request; its log says why")


def _explain(items: Sequence[Any]) -> str:
    """One line that names each field as the user wrote it, without the part of the request it came in."""
    return "; ".join(f"{_field(item)}: {_message(item)}" for item in items)


def _field(item: dict[str, Any]) -> str:
    if item["type"] == "json_invalid":
        return "body"
    return ".".join(map(str, item["loc"][1:])) or str(item["loc"][0])


def _message(item: dict[str, Any]) -> str:
    return f"not JSON: {item['ctx']['error']}" if item["type"] == "json_invalid" else finding(item)
