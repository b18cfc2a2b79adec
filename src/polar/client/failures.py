"""What went wrong with a call, as the errors that the commands show."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from polar.errors import Conflict, Forbidden, InvalidInput, NotFound, PolarError, Unavailable
from polar.models.views import Problem

_FROM_A_PROXY = (502, 503, 504)
"""What a proxy answers in its own words while the server behind it is away."""


def waited_too_long() -> Unavailable:
    return Unavailable("the tasks did not end in time", hint="they go on; wait again")


def failure(status: int, body: bytes) -> PolarError:
    """The error that an answer stands for."""
    try:
        problem = Problem.model_validate_json(body)
    except ValidationError:
        if status in _FROM_A_PROXY:
            return Unavailable(f"the server cannot be reached: what stands before it answered {status}")
        return PolarError(f"the server answered {status}, and not as Polar does", hint="check its address")
    if status == 401:
        return PolarError(
            "the server refused the token",
            hint="set POLAR_TOKEN to one that `polar token create` made, or to the content of the file"
            " `token` in the server's data directory",
        )
    if status == 403:
        return Forbidden(problem.error, hint="`polar token create` makes tokens of any role, for admins")
    kind = InvalidInput if status < 500 else PolarError
    return {404: NotFound, 409: Conflict, 503: Unavailable}.get(status, kind)(problem.error)


def refusal(problem: Problem) -> PolarError:
    """The error that a part of an answer stands for."""
    kinds = {
        "invalid_input": InvalidInput,
        "not_found": NotFound,
        "conflict": Conflict,
        "unavailable": Unavailable,
    }
    return kinds.get(problem.code, PolarError)(problem.error)


def unreachable(server: str, error: httpx.TransportError) -> Unavailable:
    if isinstance(error, httpx.TimeoutException):
        return Unavailable(f"the server at {server} did not answer in time")
    reason = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return Unavailable(
            f"the server at {server} shows a certificate that is not trusted: {reason}",
            hint="set POLAR_CA to the file of the authority that signed it",
        )
    return Unavailable(
        f"the server at {server} cannot be reached: {reason}", hint="is `polar serve` running?"
    )
