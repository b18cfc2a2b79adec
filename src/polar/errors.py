"""The errors that Polar raises on purpose: what happened, and what the user can do about it."""

from __future__ import annotations

from typing import Any


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


def finding(item: Any) -> str:
    """What pydantic found wrong with one field, in words of who wrote it."""
    match item["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "unknown key"
        case "string_pattern_mismatch" if "'^https?://" in item["msg"]:
            return "must be an address that begins with http:// or https://"
        case _:
            return str(item["msg"]).removeprefix("Value error, ")
