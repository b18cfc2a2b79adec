"""What a session holds and wastes of its gateway is bounded; other sessions do not notice."""

from __future__ import annotations

import asyncio
import gzip
import logging
import random
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.config.settings import GatewaySettings
from polar.dialects.base import RequestRefused
from polar.engines.base import EngineDown, EngineError
from polar.gateway.call import MESSAGES_DROPPED
from polar.gateway.quota import GatewayMemory, SessionQuota, memory_of, values_in
from polar.gateway.server import new_key
from polar.models.chat import FinishReason, Message, ToolDefinition
from polar.models.session import AgentEnd
from polar.rendering.base import Renderer
from tests.fakes.scripted_engine import Answer
from tests.unit.gateway.conftest import Scene, SetScene
from tests.unit.gateway.test_hostile_requests_are_refused import ADDRESSES

MIB = 1 << 20


async def send(
    scene: Scene, body: Any, path: str = ADDRESSES["openai_chat"], **headers: str
) -> tuple[int, Any]:
    """The status of the answer and its document."""
    url = f"http://{scene.gateway.host}:{scene.gateway.port}{path}"
    auth = {"Authorization": f"Bearer {scene.grant.key}"}
    async with scene.http.post(url, data=body, headers=auth | headers) as response:
        return response.status, await response.json(content_type=None)


async def open_another(scene: Scene) -> Scene:
    """Another session of the same gateway."""
    grant = replace(scene.grant, session_id="s2", key=new_key(), capture=scene.grant.capture.with_name("s2"))
    scene.gateway.open_session(grant)
    return replace(scene, grant=grant)


async def budget_spent(scene: Scene) -> tuple[AgentEnd, str]:
    return await asyncio.wait_for(scene.gateway.budget_spent(scene.grant.session_id), 20)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "identity"])
async def test_a_compressed_body_is_served(set_scene: SetScene, encoding: str) -> None:
    scene = await set_scene(["Hello."])
    sound = orjson.dumps(scene.body())
    packed = {"gzip": gzip.compress(sound), "deflate": zlib.compress(sound), "identity": sound}
    status, _ = await send(scene, packed[encoding.lower()], **{"Content-Encoding": encoding})
    assert status == 200


@pytest.mark.parametrize("dialect", ADDRESSES)
async def test_a_body_that_inflates_beyond_the_limit_is_413(set_scene: SetScene, dialect: str) -> None:
    scene = await set_scene([], settings=GatewaySettings(max_body_bytes=MIB))
    bomb = gzip.compress(b'{"model": "' + b"x" * 20 * MIB + b'"}')
    status, answer = await send(scene, bomb, ADDRESSES[dialect], **{"Content-Encoding": "gzip"})
    assert status == 413
    assert answer["error"]["message"]


@pytest.mark.parametrize("dialect", ADDRESSES)
@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"{}"),
        ("deflate", b"{}"),
        ("gzip", gzip.compress(b"{}" * 100)[:-5]),
        ("gzip", gzip.compress(b"{}") + b"more"),
        ("br", b"{}"),
        ("zstd", b"{}"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}"))),
    ],
    ids=["no gzip", "no deflate", "cut short", "with more behind", "br", "zstd", "twice"],
)
async def test_a_wrong_encoding_is_400_in_the_dialect_s_words(
    set_scene: SetScene, dialect: str, encoding: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    scene = await set_scene([])
    status, answer = await send(scene, body, ADDRESSES[dialect], **{"Content-Encoding": encoding})
    assert status == 400
    assert answer["error"]["message"]
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


async def test_a_head_that_never_ends_is_closed(set_scene: SetScene) -> None:
    scene = await set_scene([], settings=GatewaySettings(head_seconds=0.05))
    reader, writer = await asyncio.open_connection(scene.gateway.host, scene.gateway.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthor")
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_a_body_that_never_ends_is_refused(set_scene: SetScene) -> None:
    scene = await set_scene([], settings=GatewaySettings(body_seconds=0.05))

    async def stalled() -> AsyncIterator[bytes]:
        yield b'{"model":'
        await asyncio.Event().wait()

    status, answer = await asyncio.wait_for(send(scene, stalled()), 20)
    assert status == 400
    assert "did not arrive" in answer["error"]["message"]


async def test_bytes_in_flight_are_bounded_for_a_session_and_leave_room_for_others(
    set_scene: SetScene,
) -> None:
    settings = GatewaySettings(max_bytes_in_flight=MIB, max_gateway_bytes_in_flight=MIB)
    gate = asyncio.Event()
    scene = await set_scene(
        [Answer("Slow.", gate=gate), "Fast.", "Again."], settings=settings, max_context=10**6
    )
    other = await open_another(scene)
    held = asyncio.create_task(send(scene, orjson.dumps(scene.body("a " * 400_000))))
    await scene.engine.waiting.wait()
    status, answer = await send(scene, orjson.dumps(scene.body("b " * 200_000)))
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    status, _ = await send(other, orjson.dumps(scene.body("c " * 200_000)))
    assert status == 429, "the gateway is full, and this is more than every session is guaranteed"
    assert (await send(other, orjson.dumps(scene.body("short"))))[0] == 200
    gate.set()
    assert (await held)[0] == 200
    assert (await send(scene, orjson.dumps(scene.body("b " * 200_000))))[0] == 200


async def test_a_body_of_very_many_values_is_too_large(set_scene: SetScene) -> None:
    scene = await set_scene([], settings=GatewaySettings(max_bytes_in_flight=4 * MIB))
    body = b'{"model": "scripted", "messages": [' + b"{}," * 100_000 + b"{}]}"
    status, answer = await send(scene, body)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_calls_in_flight_are_bounded(set_scene: SetScene) -> None:
    gate = asyncio.Event()
    scene = await set_scene(
        [Answer("One.", gate=gate), "Two."], settings=GatewaySettings(max_calls_in_flight=1)
    )
    first = asyncio.create_task(send(scene, orjson.dumps(scene.body())))
    await scene.engine.waiting.wait()
    assert (await send(scene, orjson.dumps(scene.body())))[0] == 429
    gate.set()
    assert (await first)[0] == 200
    assert (await send(scene, orjson.dumps(scene.body())))[0] == 200


async def test_more_answers_than_may_be_in_flight_are_refused_for_good(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello."] * 2, settings=GatewaySettings(max_calls_in_flight=2))
    status, answer = await send(scene, orjson.dumps(scene.body(n=3)))
    assert (status, answer["error"]["param"]) == (400, "n")
    assert answer["error"]["message"] == "3 answers are asked for; one request may ask for 2 at most."
    assert (await send(scene, orjson.dumps(scene.body(n=2))))[0] == 200


async def test_failed_calls_spend_a_budget(set_scene: SetScene) -> None:
    failure = EngineError("no")
    scene = await set_scene([failure, failure, "Hello."], settings=GatewaySettings(max_failed_calls=4))
    sound = orjson.dumps(scene.body())
    stream = orjson.dumps(scene.body(stream=True))
    spent = asyncio.create_task(budget_spent(scene))
    assert [(await send(scene, body))[0] for body in (b"{", sound, b"[]")] == [400, 502, 400]
    assert not spent.done()
    async with scene.http.post(
        scene.url, data=stream, headers={"Authorization": f"Bearer {scene.grant.key}"}
    ) as response:
        assert b"error" in await response.read()
    assert await spent == (AgentEnd.BUDGET, "4 model calls have failed")
    status, answer = await send(scene, sound)
    assert (status, answer["error"]["code"]) == (400, "insufficient_quota")


async def test_an_engine_that_is_down_spends_nothing(set_scene: SetScene) -> None:
    down = EngineDown("down")
    scene = await set_scene([down, down, "Hello."], settings=GatewaySettings(max_failed_calls=1))
    sound = orjson.dumps(scene.body())
    assert [(await send(scene, sound))[0] for _ in range(3)] == [503, 503, 200]


async def test_a_capture_over_its_limit_ends_the_agent(set_scene: SetScene) -> None:
    scene = await set_scene(
        ["Hello."], settings=GatewaySettings(max_capture_bytes=64 * 1024), max_context=10**6
    )
    assert (await send(scene, orjson.dumps(scene.body(random.Random(0).randbytes(100_000).hex()))))[0] == 200
    assert (await budget_spent(scene))[0] is AgentEnd.BUDGET
    assert (await send(scene, orjson.dumps(scene.body())))[0] == 400


async def test_a_call_that_the_engine_refuses_is_recorded_in_brief(set_scene: SetScene) -> None:
    scene = await set_scene([EngineError("too much")], max_context=10**6)
    long = [{"role": "user", "content": f"{'x ' * 100_000}{number}"} for number in range(5)]
    tool = {"type": "function", "function": {"name": "t", "description": "d" * 100_000}}
    body = scene.body(messages=long, tools=[tool], stop=["s" * 100_000])
    assert (await send(scene, orjson.dumps(body)))[0] == 502
    (completion,) = await scene.captured()
    assert completion.finish_reason is FinishReason.ERROR
    assert completion.extra[MESSAGES_DROPPED] == "4"
    assert completion.omitted == {}, "what is left of a record is no part that the model was not shown"
    assert completion.messages[-1].content.endswith("x 4")
    assert scene.grant.capture.stat().st_size < 64 * 1024


async def test_a_prompt_that_is_too_long_by_far_is_refused_unrendered(
    set_scene: SetScene, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await set_scene([], max_context=64)
    monkeypatch.setattr(renderer, "render", None)
    for more in (
        {"content": "x" * 2000},
        {"tools": [{"function": {"name": "t", "description": "d" * 2000}}]},
    ):
        status, answer = await send(scene, orjson.dumps(scene.body(**more)))
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert not await scene.captured()


async def test_token_ids_that_do_not_fit_are_refused_unread(
    set_scene: SetScene, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await set_scene([], max_context=64)
    monkeypatch.setattr(renderer, "spelling", None)
    body = orjson.dumps({"model": "scripted", "prompt": [5] * 64, "n": 100})
    status, answer = await send(scene, body, "/v1/completions")
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "64 tokens" in answer["error"]["message"]
    assert not await scene.captured()


async def test_a_very_long_prompt_is_tokenised_only_if_it_may_fit(
    set_scene: SetScene, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await set_scene(["Hello."], max_context=80_000)
    rendered: list[int] = []
    render = renderer.render

    def measured(messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]:
        ids = list(render(messages, tools))
        rendered.append(len(ids))
        return ids

    monkeypatch.setattr(renderer, "render", measured)
    status, answer = await send(scene, orjson.dumps(scene.body("a " * 300_000)))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert max(rendered) < 40_000, "only samples of it"
    assert (await send(scene, orjson.dumps(scene.body("a word or two " * 19_000))))[0] == 200
    assert max(rendered) > 70_000


async def test_a_quota_comes_back_when_a_client_leaves(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello."], settings=GatewaySettings(max_calls_in_flight=1))
    reader, writer = await asyncio.open_connection(scene.gateway.host, scene.gateway.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {scene.grant.key}\r\n"
    writer.write(head.encode() + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
    assert b"100" in await reader.readline()
    writer.transport.abort()
    async with asyncio.timeout(20):
        while (status := (await send(scene, orjson.dumps(scene.body())))[0]) == 429:
            pass
    assert status == 200


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3000)), max_size=60),
)
def test_what_is_held_is_bounded_and_comes_back(steps: list[tuple[int, int, int]]) -> None:
    settings = GatewaySettings(max_bytes_in_flight=2048, max_gateway_bytes_in_flight=4096)
    memory = GatewayMemory(settings)
    quotas = [SessionQuota(settings, memory) for _ in range(3)]
    with ExitStack() as stack:
        held = [[stack.enter_context(quota.request()) for _ in range(4)] for quota in quotas]
        for session, request, size in steps:
            with suppress(RequestRefused):
                held[session][request].hold(size)
        sizes = [sum(request.size for request in requests) for requests in held]
        assert max(sizes) <= 2048
        assert memory.held == sum(sizes) <= 4096 + 3 * 512
    assert memory.held == 0


@pytest.mark.parametrize("value", ["{}", "[]", "1", '""', "[[]]"])
def test_the_memory_of_a_body_is_not_estimated_far_below_what_it_takes(value: str) -> None:
    body = f"[{','.join([value] * 1000)}]".encode()
    assert memory_of(body) >= 64 * 1000


def test_a_long_context_of_data_takes_no_more_memory_than_its_text() -> None:
    tables = ",".join(map(str, range(700_000))) + '\n{"a": [1, 2, {}]}\\' * 10_000
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": tables}]})
    assert len(body) < memory_of(body) < len(body) + 1024


async def test_arguments_of_many_values_count_as_what_they_take(set_scene: SetScene) -> None:
    settings = GatewaySettings(max_bytes_in_flight=4 * MIB)
    scene = await set_scene([], settings=settings)
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": "[" + "[]," * 200_000 + "1]"},
    }
    said = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    status, answer = await send(scene, orjson.dumps({**scene.body(), "messages": said}))
    assert status == 413, answer


@given(
    st.recursive(
        st.one_of(st.text(alphabet='\\",[{a\n\u00e9'), st.integers(0, 9)),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='\\",[{'), inner),
    ),
    st.integers(1, 9),
)
def test_values_are_counted_wherever_a_document_is_cut(document: object, step: int) -> None:
    body = orjson.dumps(document)
    assert values_in(body, step) == marks(document)


def marks(document: object) -> int:
    """Brackets that open, and commas, in the JSON of a document."""
    if not isinstance(document, list | dict):
        return 0
    inner = document.values() if isinstance(document, dict) else document
    return 1 + max(len(document) - 1, 0) + sum(map(marks, inner))
