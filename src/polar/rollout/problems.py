"""Errors as the control plane answers them: always a `Problem`, always one line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from polar.errors import Conflict, InvalidInput, NotFound, PolarError, Unavailable, problems
from polar.models.views import Problem
from polar.rollout.dashboard.files import not_found

log = logging.getLogger(__name__)

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "The request cannot be followed; `error` says why."},
    "5XX": {"model": Problem, "description": "The server cannot answer; trying again may help."},
}
"""For the OpenAPI document of every route."""

_STATUSES: Mapping[type[PolarError], int] = {
    InvalidInput: 400,
    NotFound: 404,
    Conflict: 409,
    Unavailable: 503,
}

_CODES = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    413: "too_large",
    500: "internal",
    503: "unavailable",
}

# JSON can hold half a character and numbers without end; no database stores either.
_NOT_STORABLE = (
    "the request holds text that is not Unicode or a number beyond 64 bits, which cannot be stored"
)


def answer_problems(app: FastAPI) -> None:
    """Turn every error that a route can raise into a `Problem`."""
    for kind in (
        *(PolarError, RequestValidationError, HTTPException, ClientDisconnect),
        *(UnicodeEncodeError, OverflowError, Exception),
    ):
        app.add_exception_handler(kind, _answer)


def problem_of(error: Exception) -> tuple[int, Problem]:
    """The HTTP status that an error stands for, and what is said of it."""
    match error:
        case PolarError():
            kinds = (status for kind, status in _STATUSES.items() if isinstance(error, kind))
            status, said = next(kinds, 500), str(error)
        case RequestValidationError():
            status, said = 400, "; ".join(problems(map(_as_written, error.errors())))
        case HTTPException():
            status, said = error.status_code, str(error.detail)
        case ClientDisconnect():
            status, said = 400, "the request was not sent whole"
        case UnicodeEncodeError() | OverflowError():
            status, said = 400, _NOT_STORABLE
        case _:
            status, said = 500, "the server failed on this request; its log says why"
    return status, Problem(error=said, code=_CODES.get(status, "invalid_input"))


async def _answer(request: Request, error: Exception) -> Response:
    status, problem = problem_of(error)
    what = f"{request.method} {request.url.path}"
    if status in (404, 405) and isinstance(error, HTTPException):
        if status == 404 and "text/html" in request.headers.get("accept", ""):
            return not_found()
        problem = problem.model_copy(update={"error": f"{what}: {problem.error}"})
    if status == 500:
        log.error("%s failed: %s", what, error, exc_info=None if isinstance(error, PolarError) else error)
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(problem.model_dump(), status, headers)


def _as_written(item: dict[str, Any]) -> dict[str, Any]:
    """An error about a request whose field is named without the part of the request it came in."""
    if item["type"] == "json_invalid":
        return {**item, "loc": ("body",), "msg": f"not JSON: {item['ctx']['error']}"}
    return {**item, "loc": item["loc"][1:] or item["loc"]}
