"""Headers that clients repeat do no harm, and what is not HTTP is refused in JSON, without a traceback."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest

from polar.gateway.http import without_repeated_headers
from tests.unit.gateway.conftest import Scene, SetScene


async def answers(scene: Scene, *requests: bytes) -> list[tuple[int, dict[str, object]]]:
    """Status and document of the answer to each request, sent one after the other on one connection."""
    reader, writer = await asyncio.open_connection(scene.gateway.host, scene.gateway.port)
    got = []
    async with asyncio.timeout(20):
        for request in requests:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b"content-type: application/json" in head
            length = int(head.split(b"content-length: ")[1].split(b"\r")[0])
            got.append((int(head.split()[1]), orjson.loads(await reader.readexactly(length))))
    writer.close()
    return got


def post(scene: Scene, headers: bytes, body: bytes) -> bytes:
    auth = f"Authorization: Bearer {scene.grant.key}\r\nContent-Length: {len(body)}\r\n".encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + auth + headers + b"\r\n" + body


async def test_repeated_headers_are_taken_on_every_request_of_a_connection(set_scene: SetScene) -> None:
    scene = await set_scene(["One.", "Two."])
    twice = b"User-Agent: a\r\nContent-Type: application/json\r\nuser-agent: b\r\ncontent-type: x\r\n"
    request = post(scene, twice, orjson.dumps(scene.body("\r\nUser-Agent: said in the body")))
    assert [status for status, _ in await answers(scene, request, request)] == [200, 200]
    for completion in await scene.captured():
        assert completion.messages[-1].content == "\r\nUser-Agent: said in the body"


async def test_an_unknown_expectation_does_no_harm(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello."])
    request = post(scene, b"Expect: the unexpected\r\n", orjson.dumps(scene.body()))
    assert [status for status, _ in await answers(scene, request)] == [200]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"BREW /v1/models COFFEE/1.0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}\r\nno\r\n",
        b"GET /v1/models HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + b"X: x\r\n" * 1000 + b"\r\n",
    ],
)
async def test_what_is_not_http_is_refused_in_json(
    set_scene: SetScene, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    scene = await set_scene([])
    ((status, answer),) = await answers(scene, garbage)
    assert status == 400
    assert str(answer["error"]["message"]).startswith("The request is not valid HTTP")  # type: ignore[index]
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nUser-Agent: a\r\nUser-",
        b"GET / HTTP/1.1\r\nUser-Agent: a\r\n\r\nUser-Agent: b\r\nUser-Agent: c\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_nothing_else_is_changed(data: bytes) -> None:
    assert without_repeated_headers(data) == data
