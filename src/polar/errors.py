"""The errors that Polar raises on purpose, the wording of validation errors, and retrying with backoff."""

from __future__ import annotations

import asyncio
import difflib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class PolarError(Exception):
    """An error whose message is meant for a person; the command line prints it as one line."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidInput(PolarError):
    """Something a user wrote (a task, a configuration, an option) is not acceptable."""


class NotInstalled(PolarError):
    """A harness, runtime or model is named but cannot be used on this machine."""


class NotFound(PolarError):
    """The thing asked for does not exist."""


class Conflict(PolarError):
    """The request contradicts what is stored: same id with other content, or an old fencing token."""


class Forbidden(PolarError):
    """The role of the token does not allow this."""


class Unavailable(PolarError):
    """A server or engine cannot be reached or cannot answer now; trying again may help."""


@contextmanager
def concerning(subject: str) -> Iterator[None]:
    """Prefix errors raised in the block with what they are about."""
    try:
        yield
    except PolarError as error:
        if subject not in error.message:
            error.message = f"{subject}: {error.message}"
        raise


def explain(error: ValidationError, within: str = "", known: Collection[str] = ()) -> str:
    """Describe a validation error on one line that names each field and what it accepts."""
    return "; ".join(
        problems(error.errors(include_url=False, include_context=False), within=within, known=known)
    )


def problems(errors: Iterable[Any], *, within: str = "", known: Collection[str] = ()) -> list[str]:
    """Describe what pydantic found wrong, one `field: problem` per field.

    `within` is the field whose value was checked. For a field that does not exist, the nearest of the
    `known` ones is suggested.
    """
    return [_problem(item, within, known) for item in errors]


def _problem(item: Any, within: str, known: Collection[str]) -> str:
    field = ".".join([*([within] if within else []), *map(str, item["loc"])]) or "document"
    is_unknown = item["type"] == "extra_forbidden"
    return f"{field}: {_in_words(item)}" + (likely(field, known) if is_unknown else "")


def likely(name: str, known: Iterable[str]) -> str:
    """Suggest the known name nearest to a misspelt one, if there is one."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _in_words(item: Any) -> str:
    match item["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "unknown key"
        case "string_pattern_mismatch" if "'^https?://" in item["msg"]:
            return "must be a URL that begins with http:// or https://"
        case _:
            return str(item["msg"]).removeprefix("Value error, ")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter: each pause is up to twice as long as the previous one."""

    first_seconds: float
    longest_seconds: float
    attempts: int | None = None
    """The number of attempts in all; None retries forever."""

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after this many failures, of which half are random."""
        longest = min(self.first_seconds * 2.0 ** min(failures - 1, 30), self.longest_seconds)
        return longest * random.uniform(0.5, 1.0)

    def pauses(self) -> Iterator[float]:
        """Yield the pause before each attempt after the first."""
        failures = count(1) if self.attempts is None else range(1, self.attempts)
        return map(self.pause, failures)


RESTART = Backoff(0.5, 30.0, attempts=12)
"""Two to four minutes in all: long enough for a server to restart."""
ENDLESS = Backoff(0.25, 5.0)


def retry(call: Callable[[], T], backoff: Backoff | None = None) -> T:
    for pause in (backoff or RESTART).pauses():
        try:
            return call()
        except Unavailable as error:
            log.warning("%s; trying again in %.1f s", error, pause)
            time.sleep(pause)
    return call()


async def retry_async(
    call: Callable[[], Awaitable[T]], backoff: Backoff | None = None, purpose: str = "get an answer"
) -> T:
    """Await a call until it succeeds, retrying while it raises Unavailable."""
    for pause in (backoff or RESTART).pauses():
        try:
            return await call()
        except Unavailable as error:
            log.warning("could not %s, trying again in %.1f s: %s", purpose, pause, error)
            await asyncio.sleep(pause)
    return await call()


async def retry_forever(
    purpose: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Await a call until it succeeds, however long it raises Unavailable."""
    return await retry_async(lambda: call(*args, **kwargs), ENDLESS, purpose)
