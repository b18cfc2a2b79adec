"""An engine double that speaks vLLM's wire from bytes made beforehand, as fast as Python writes them.

    python -m gateway.upstream WIRE.json

Prints its port. Streams can be told to begin late and to stay open: see `Behaviour`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.gateway.wire import MODEL, Wire


@dataclass(slots=True)
class Behaviour:
    """How streams run; changed by POST /behaviour."""

    first_token_after: float = 0.0
    """Seconds between the headers and the first token."""
    stays_open: bool = False
    """Whether a stream waits after its first token until the next POST /behaviour."""
    first_tokens: list[float] = field(default_factory=list)
    """When each delayed stream's first token was written, by the clock all processes share."""
    waiting: list[tuple[asyncio.Transport, bytes]] = field(default_factory=list)

    def change(self, first_token_after: float, stays_open: bool) -> None:
        self.first_token_after, self.stays_open = first_token_after, stays_open
        waiting, self.waiting = self.waiting, []
        for transport, rest in waiting:
            if not transport.is_closing():
                transport.write(rest)


@dataclass(frozen=True, slots=True)
class Stream:
    """The bytes of one streamed answer."""

    head: bytes
    first: bytes
    rest: bytes

    @classmethod
    def of(cls, events: list[bytes]) -> Stream:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
        return cls(head, b"".join(chunks[:2]), b"".join([*chunks[2:], b"0\r\n\r\n"]))


class Answers:
    """Every answer the double gives."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._usage = {
            "prompt_tokens": len(wire.prompt_ids),
            "completion_tokens": len(wire.sampled_ids),
            "total_tokens": len(wire.prompt_ids) + len(wire.sampled_ids),
        }
        self.models = _whole(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]}
        )
        self.chat = {with_ids: _whole(self._chat(with_ids)) for with_ids in (False, True)}
        self.chat_stream = {with_ids: Stream.of(self._chat_events(with_ids)) for with_ids in (False, True)}
        self.completion = _whole(self._completion())
        self.completion_stream = Stream.of(self._completion_events())
        self.unknown = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"

    def _chat(self, with_ids: bool) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(self._wire.pieces),
            "refusal": None,
            "tool_calls": [],
        }
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        root: dict[str, Any] = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": MODEL}
        root |= {"choices": [choice], "usage": self._usage}
        if with_ids:
            entries = [self._logprob(position) for position in range(len(self._wire.pieces))]
            choice |= {"logprobs": {"content": entries}, "token_ids": self._wire.sampled_ids}
            root["prompt_token_ids"] = self._wire.prompt_ids
        return root

    def _chat_events(self, with_ids: bool) -> list[bytes]:
        root = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        opening: dict[str, Any] = {"role": "assistant", "content": ""}
        first = root | {"choices": [_choice({"delta": opening, "logprobs": None})]}
        events = [first | {"prompt_token_ids": self._wire.prompt_ids} if with_ids else first]
        last = len(self._wire.pieces) - 1
        for position, piece in enumerate(self._wire.pieces):
            choice = _choice({"delta": {"content": piece}, "logprobs": None})
            if with_ids:
                choice["logprobs"] = {"content": [self._logprob(position)]}
                choice["token_ids"] = [self._wire.sampled_ids[position]]
            choice["finish_reason"] = "length" if position == last else None
            events.append(root | {"choices": [choice]})
        return _events([*events, root | {"choices": [], "usage": self._usage}])

    def _completion(self) -> dict[str, Any]:
        choice = _choice({"text": "".join(self._wire.pieces), "token_ids": self._wire.sampled_ids})
        logprobs = [self._logprob(position)["logprob"] for position in range(len(self._wire.pieces))]
        choice |= {"logprobs": {"token_logprobs": logprobs}, "finish_reason": "length"}
        return {"id": "cmpl-0", "object": "text_completion", "choices": [choice], "usage": self._usage}

    def _completion_events(self) -> list[bytes]:
        root = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": MODEL}
        last = len(self._wire.pieces) - 1
        events = []
        for position, (id, piece) in enumerate(zip(self._wire.sampled_ids, self._wire.pieces, strict=True)):
            logprobs = {"token_logprobs": [self._logprob(position)["logprob"]], "tokens": [piece]}
            choice = _choice({"text": piece, "token_ids": [id], "logprobs": logprobs})
            choice["finish_reason"] = "length" if position == last else None
            events.append(root | {"choices": [choice]})
        # The first chunk of a stream holds no token, as in chat.
        empty = root | {"choices": [_choice({"text": "", "token_ids": [], "logprobs": None})]}
        return _events([empty, *events, root | {"choices": [], "usage": self._usage}])

    def _logprob(self, position: int) -> dict[str, Any]:
        piece = self._wire.pieces[position]
        value = -0.01 * (position + 1) - 0.123456789
        return {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests come one after another."""

    _transport: asyncio.Transport

    def __init__(self, answers: Answers, behaviour: Behaviour) -> None:
        self._answers = answers
        self._behaviour = behaviour
        self._received = bytearray()
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if len(received) < self._needed:
            return
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(received[:end])
        self._needed = end + 4 + _content_length(head)
        if len(received) < self._needed:
            return
        body = bytes(received[end + 4 : self._needed])
        del received[: self._needed]
        self._needed = 0
        self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        answers = self._answers
        match path:
            case b"/v1/chat/completions":
                with_ids = b"return_token_ids" in body
                if _is_stream(body):
                    self._stream(answers.chat_stream[with_ids])
                else:
                    self._transport.write(answers.chat[with_ids])
            case b"/v1/completions":
                if _is_stream(body):
                    self._stream(answers.completion_stream)
                else:
                    self._transport.write(answers.completion)
            case b"/v1/models":
                self._transport.write(answers.models)
            case b"/behaviour":
                self._behaviour.change(**json.loads(body))
                self._transport.write(_whole({}))
            case b"/first_tokens":
                self._transport.write(_whole(self._behaviour.first_tokens))
                self._behaviour.first_tokens.clear()
            case _:
                self._transport.write(answers.unknown)

    def _stream(self, stream: Stream) -> None:
        behaviour = self._behaviour
        if not behaviour.first_token_after and not behaviour.stays_open:
            self._transport.write(stream.head + stream.first + stream.rest)
            return
        self._transport.write(stream.head)
        asyncio.get_running_loop().call_later(behaviour.first_token_after, self._begin, stream)

    def _begin(self, stream: Stream) -> None:
        if self._transport.is_closing():
            return
        self._behaviour.first_tokens.append(time.perf_counter())
        if self._behaviour.stays_open:
            self._transport.write(stream.first)
            self._behaviour.waiting.append((self._transport, stream.rest))
        else:
            self._transport.write(stream.first + stream.rest)


def _content_length(head: bytes) -> int:
    lowered = head.lower()
    at = lowered.find(b"content-length:")
    return (
        int(lowered[at + 15 : lowered.find(b"\r", at) if b"\r" in lowered[at:] else None]) if at >= 0 else 0
    )


def _is_stream(body: bytes) -> bool:
    return b'"stream":true' in body or b'"stream": true' in body


def _choice(fields: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "finish_reason": None} | fields


def _events(bodies: list[dict[str, Any]]) -> list[bytes]:
    return [b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n" for body in bodies] + [
        b"data: [DONE]\n\n"
    ]


def _whole(body: Any) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
    return head + data


async def serve(wire: Wire) -> None:
    answers, behaviour = Answers(wire), Behaviour()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers, behaviour), "127.0.0.1", 0, backlog=2048)
    print("ready", server.sockets[0].getsockname()[1], flush=True)
    gc.collect()
    gc.disable()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(Wire(**json.loads(Path(sys.argv[1]).read_text()))))
