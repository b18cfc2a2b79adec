"""Anthropic's Messages API on Amazon Bedrock: signed requests, binary event streams, AWS errors.

The bodies are Anthropic's. The session key comes as a bearer token (a Bedrock API key) or as the access key
id of a signed request; it is itself a secret, so the signature is not checked.
"""

from __future__ import annotations

import base64
import re
import secrets
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from polar.dialects.anthropic_messages import WORTH_RETRYING, AnthropicMessages, MessageStream, sentence
from polar.dialects.base import (
    CallIdentity,
    HttpAnswer,
    Refusal,
    RequestRefused,
    Route,
    RouteAction,
    StreamEncoder,
)
from polar.models.chat import ChatRequest

_SIGNED = "AWS4-HMAC-SHA256 "
_ACCESS_KEY = re.compile(r"Credential=([^/,\s]+)/")
_ERRORS: dict[Refusal, tuple[int, str]] = {
    Refusal.UNKNOWN_KEY: (403, "UnrecognizedClientException"),
    Refusal.SESSION_ENDED: (403, "ExpiredTokenException"),
    Refusal.UNKNOWN_ROUTE: (404, "UnknownOperationException"),
    Refusal.UNKNOWN_MODEL: (404, "ResourceNotFoundException"),
    Refusal.UNKNOWN_RESPONSE: (404, "ResourceNotFoundException"),
    Refusal.MALFORMED: (400, "ValidationException"),
    Refusal.TOO_LARGE: (413, "RequestEntityTooLargeException"),
    Refusal.CONTEXT_OVERFLOW: (400, "ValidationException"),
    Refusal.BUDGET_SPENT: (400, "ServiceQuotaExceededException"),
    Refusal.OVER_QUOTA: (429, "ThrottlingException"),
    Refusal.ENGINE_FAILED: (500, "InternalServerException"),
    Refusal.ENGINE_DOWN: (503, "ServiceUnavailableException"),
    Refusal.INTERNAL: (500, "InternalServerException"),
}
_STREAM_EXCEPTIONS = frozenset(
    {
        "internalServerException",
        "serviceUnavailableException",
        "throttlingException",
        "validationException",
    }
)
"""Exceptions that may end a stream; all others become `modelStreamErrorException` there."""


class BedrockMessages(AnthropicMessages):
    name: ClassVar[str] = "bedrock_messages"
    routes: ClassVar[tuple[Route, ...]] = (
        Route("POST", "/model/{model:.+}/invoke", RouteAction.COMPLETE, is_stream=False),
        Route("POST", "/model/{model:.+}/invoke-with-response-stream", RouteAction.COMPLETE, is_stream=True),
    )

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        given = headers.get("Authorization", "")
        if not given.startswith(_SIGNED):
            return super().key(headers, query)
        access_key = _ACCESS_KEY.search(given)
        return access_key[1] if access_key else None

    def claims(self, headers: Mapping[str, str]) -> bool:
        return headers.get("Authorization", "").startswith(_SIGNED)

    def stream(self, identity: CallIdentity, request: ChatRequest) -> Sequence[StreamEncoder]:
        return (BedrockStream(identity),)

    def error(self, error: RequestRefused) -> HttpAnswer:
        status, type_ = _ERRORS[error.refusal]
        headers = {
            "x-amzn-ErrorType": type_,
            "x-amzn-RequestId": secrets.token_hex(12),
            "x-should-retry": "true" if error.refusal in WORTH_RETRYING else "false",
        }
        return HttpAnswer(status, orjson.dumps({"message": sentence(error)}), headers)


class BedrockStream(MessageStream):
    """Anthropic's events, each wrapped in a binary message of an AWS event stream."""

    content_type: ClassVar[str] = "application/vnd.amazon.eventstream"

    def error(self, error: RequestRefused) -> bytes:
        type_ = _ERRORS[error.refusal][1]
        told = type_[0].lower() + type_[1:]
        told = told if told in _STREAM_EXCEPTIONS else "modelStreamErrorException"
        headers = {":message-type": "exception", ":exception-type": told}
        return frame_message(headers, orjson.dumps({"message": sentence(error)}))

    def _event(self, type_: str, body: dict[str, Any]) -> bytes:
        event = base64.b64encode(orjson.dumps({"type": type_} | body)).decode()
        return frame_message(
            {":message-type": "event", ":event-type": "chunk"}, orjson.dumps({"bytes": event})
        )


def frame_message(headers: Mapping[str, str], payload: bytes) -> bytes:
    """Encode an event-stream message: lengths, their checksum, headers, payload, checksum of it all."""
    head = b"".join(_header(*header) for header in {**headers, ":content-type": "application/json"}.items())
    lengths = struct.pack(">II", 16 + len(head) + len(payload), len(head))
    message = lengths + struct.pack(">I", zlib.crc32(lengths)) + head + payload
    return message + struct.pack(">I", zlib.crc32(message))


def _header(name: str, value: str) -> bytes:
    is_string = 7
    return struct.pack(f">B{len(name)}sBH", len(name), name.encode(), is_string, len(value)) + value.encode()
