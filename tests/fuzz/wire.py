"""Requests as bytes on the wire: sound ones, and what becomes of them when HTTP itself is bent."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass, replace
from random import Random
from urllib.parse import quote

_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "get", "PROPFIND")
_HEADERS: tuple[tuple[str, str], ...] = (
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/x-www-form-urlencoded"),
    ("Content-Type", "multipart/form-data; boundary="),
    ("Content-Type", "application/json; charset=\xff"),
    ("Content-Type", "/"),
    ("Accept", "text/html;q=nan"),
    ("Accept-Encoding", "br, zstd, \x80"),
    ("Accept-Language", "x" * 3000),
    ("User-Agent", ""),
    ("User-Agent", "again"),
    ("Content-Encoding", "gzip"),
    ("Content-Encoding", "br"),
    ("Content-Encoding", "deflate, gzip"),
    ("Expect", "100-continue"),
    ("Expect", "the unexpected"),
    ("Upgrade", "websocket"),
    ("Connection", "close"),
    ("Connection", "keep-alive, Upgrade, HTTP2-Settings"),
    ("Range", "bytes=5-1"),
    ("Range", "bytes=0-,0-,0-"),
    ("If-None-Match", "*"),
    ("If-Range", "x"),
    ("Cookie", "a=b; =; ;;\x01"),
    ("Origin", "null"),
    ("Host", "evil.example:99999"),
    ("X-Forwarded-For", "::1, 999.1.1.1"),
    ("X-Forwarded-Proto", "gopher"),
    ("traceparent", "00-zz-zz-00"),
    ("Last-Event-ID", "-1"),
    ("x-stainless-retry-count", "1"),
    ("x-stainless-retry-count", "9" * 5000),
    ("Idempotency-Key", "same"),
    ("anthropic-version", ""),
    ("anthropic-beta", "\xe9,,"),
    ("x-claude-code-agent-id", "\xff" * 300),
    ("session-id", "\x7f"),
    ("Authorization", "Bearer"),
    ("Authorization", "Basic \xff"),
    ("Authorization", "AWS4-HMAC-SHA256 Credential="),
    ("api-key", "\xff"),
    ("x-api-key", "\xc3\x28"),
    ("x-goog-api-key", ""),
    ("Transfer-Encoding", "identity"),
    ("Content-Length", "-1"),
    ("Content-Length", "1e3"),
    ("Content-Length", "9" * 30),
    ("no colon here", ""),
    ("X-Long", "x" * 9000),
)
_FRAMING = frozenset({"Transfer-Encoding", "Content-Length"})
_CLOSING = frozenset({"Expect", "Upgrade", "Connection", "no colon here"})
"""Headers after which the connection may rightly be closed."""
_PATHS = (
    "%00",
    "%ff%fe",
    "..%2f..%2f",
    "%",
    "%zz",
    "//",
    "/./",
    "?",
    "#",
    ";a=b",
    " ",
    "\xe9",
    "{id}",
    "*",
    "%F0%9F%A6%A9",
)


@dataclass(frozen=True)
class Request:
    """A request before it is written down."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Wire:
    """What is sent."""

    data: bytes
    method: str
    is_whole: bool = True
    """Whether the server can know where it ends, and has to answer; else the client hangs up after it."""
    keeps_open: bool = True
    """Whether the next request may be sent on the same connection."""


def bent(request: Request, chance: Random) -> Request:
    """The request with another method, address, or other headers."""
    match chance.randrange(4):
        case 0:
            return replace(request, method=chance.choice(_METHODS))
        case 1:
            at = chance.randrange(len(request.path) + 1)
            return replace(request, path=request.path[:at] + chance.choice(_PATHS) + request.path[at:])
        case 2:
            query = "&".join(f"{quote(chance.choice(_PATHS))}={chance.choice(_PATHS)}" for _ in range(3))
            return replace(request, path=f"{request.path}{'&' if '?' in request.path else '?'}{query}")
        case _:
            more = tuple(chance.choice(_HEADERS) for _ in range(chance.choice((1, 1, 2, 5))))
            return replace(request, headers=request.headers + more)


def written(request: Request, chance: Random, *, bends_framing: bool) -> Wire:
    """The request as bytes; `bends_framing`: with a body that is not framed as it should be."""
    body, framing, is_whole = _framed(request.body, chance) if bends_framing else (request.body, "", True)
    named = {name for name, _ in request.headers}
    if not framing and "Content-Length" not in named and (request.body or request.method in ("POST", "PUT")):
        framing = f"Content-Length: {len(request.body)}\r\n"
    version = chance.choice(("1.0", "2.0", "1.1 ", "x")) if bends_framing and chance.random() < 0.1 else "1.1"
    head = f"{request.method} {request.path} HTTP/{version}\r\nHost: localhost\r\n{framing}"
    head += "".join(f"{name}: {value}\r\n" for name, value in request.headers)
    data = head.encode("latin-1", "replace") + b"\r\n" + body
    if bends_framing and chance.random() < 0.3:
        data, is_whole = data[: chance.randrange(len(data))], False
    is_whole = is_whole and not named & _FRAMING
    return Wire(data, request.method, is_whole, is_whole and not bends_framing and not named & _CLOSING)


def _framed(body: bytes, chance: Random) -> tuple[bytes, str, bool]:
    """A body, the headers that say rightly or wrongly how it is sent, and whether its end can be seen."""
    match chance.randrange(7):
        case 0:
            return body, f"Content-Length: {len(body) + chance.choice((-1, 1, 1000))}\r\n", False
        case 1:
            return _chunked(body, chance), "Transfer-Encoding: chunked\r\n", False
        case 2:
            cut = chance.randrange(len(body) + 1)
            return _chunked(body, chance)[:cut], "Transfer-Encoding: chunked\r\n", False
        case 3:
            return body, f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n", False
        case 4:
            packed = chance.choice((gzip.compress, zlib.compress, bytes))(body)
            return packed, f"Content-Length: {len(packed)}\r\nContent-Encoding: gzip\r\n", True
        case 5:
            bomb = gzip.compress(b" " * 3_000_000)
            return bomb, f"Content-Length: {len(bomb)}\r\nContent-Encoding: gzip\r\n", True
        case _:
            return body, f"Content-Length: {len(body)}\r\nContent-Length: {len(body)}\r\n", True


def _chunked(body: bytes, chance: Random) -> bytes:
    pieces, at = b"", 0
    while at < len(body):
        size = chance.randrange(1, 5000)
        piece = body[at : at + size]
        length = len(piece) + (chance.random() < 0.02)
        pieces += f"{length:x}{';x=y' if chance.random() < 0.1 else ''}\r\n".encode() + piece + b"\r\n"
        at += size
    return pieces + b"0\r\n\r\n"
