"""The embedded server speaks vLLM's subset: bodies, streams, errors, aborts."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from polar.engines.embedded.server import EmbeddedServer
from polar.engines.vllm import VllmEngine
from polar.errors import Unavailable
from polar.models.session import PROCESSED
from tests.fakes.tiny_llama import CONTEXT

PROMPT = list(range(30, 60))


@pytest.fixture
async def http(server: EmbeddedServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def stream(http: aiohttp.ClientSession, path: str, **body: Any) -> list[dict[str, Any]]:
    async with http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        events = (await response.text()).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


async def test_models_names_context_version_and_what_logprobs_mean(
    http: aiohttp.ClientSession, server: EmbeddedServer
) -> None:
    async with http.get("/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert card["id"] == server.model.name
    assert card["max_model_len"] == CONTEXT
    assert card["policy_version"] == 0
    assert card["logprobs_mode"] == "processed_logprobs"


async def test_completion_returns_ids_logprobs_and_usage(http: aiohttp.ClientSession) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 9, "seed": 1, "return_token_ids": True, "logprobs": 0}
    status, body = await post(http, "/v1/completions", **asked)
    assert status == 200
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 9
    assert choice["finish_reason"] == "length"
    assert body["policy_version"] == 0
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["usage"]["completion_tokens"] == 9
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    _, again = await post(http, "/v1/completions", **asked)
    assert again["choices"][0]["token_ids"] == choice["token_ids"]
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": len(PROMPT) - 1}


async def test_a_token_that_was_drawn_is_not_called_the_likeliest(
    http: aiohttp.ClientSession, server: EmbeddedServer
) -> None:
    """Or else whoever compares two temperatures would judge the engine by what was drawn."""
    _, body = await post(http, "/v1/completions", prompt=PROMPT, max_tokens=1, logprobs=1)
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None
    engine = VllmEngine(server.url)
    await engine.check()
    assert (await engine.model_info()).logprobs_mode == PROCESSED
    await engine.close()


async def test_ids_and_logprobs_are_left_out_unless_asked_for(http: aiohttp.ClientSession) -> None:
    _, body = await post(http, "/v1/completions", prompt=PROMPT, max_tokens=1)
    assert "token_ids" not in body["choices"][0]
    assert body["choices"][0]["logprobs"] is None


async def test_a_streamed_completion_is_the_same_as_a_whole_one(http: aiohttp.ClientSession) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "return_token_ids": True, "logprobs": 0}
    _, whole = await post(http, "/v1/completions", **asked)
    chunks = await stream(http, "/v1/completions", **asked, stream_options={"include_usage": True})
    *deltas, last = chunks
    choices = [chunk["choices"][0] for chunk in deltas]
    expected = whole["choices"][0]
    assert [id for choice in choices for id in choice["token_ids"]] == expected["token_ids"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert [p for choice in choices for p in choice["logprobs"]["token_logprobs"]] == pytest.approx(
        expected["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert [choice["prompt_token_ids"] for choice in choices] == [PROMPT] + [None] * (len(choices) - 1)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [expected["finish_reason"]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(expected["token_ids"])
    assert all(chunk["policy_version"] == 0 for chunk in chunks)


async def test_a_streamed_chat_is_the_same_as_a_whole_one(http: aiohttp.ClientSession) -> None:
    asked = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "héllo"}]}],
        "max_completion_tokens": 30,
        "seed": 5,
        "logprobs": True,
        "return_token_ids": True,
    }
    status, whole = await post(http, "/v1/chat/completions", **asked)
    assert status == 200
    choice = whole["choices"][0]
    _, tokenized = await post(http, "/tokenize", messages=asked["messages"])
    assert whole["prompt_token_ids"] == tokenized["tokens"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    first, *rest = await stream(http, "/v1/chat/completions", **asked)
    assert first["prompt_token_ids"] == tokenized["tokens"]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    choices = [chunk["choices"][0] for chunk in rest]
    assert [id for c in choices for id in c["token_ids"]] == choice["token_ids"]
    assert "".join(c["delta"]["content"] for c in choices) == choice["message"]["content"]
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    assert all("prompt_token_ids" not in chunk for chunk in rest)


async def test_the_token_that_completes_a_stop_string_is_the_last(http: aiohttp.ClientSession) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "return_token_ids": True}
    _, free = await post(http, "/v1/completions", **asked)
    text, ids = free["choices"][0]["text"], free["choices"][0]["token_ids"]
    ascii_pairs = [text[at : at + 2] for at in range(len(text) - 1) if text[at : at + 2].isascii()]
    stop = ascii_pairs[len(ascii_pairs) // 2]
    _, stopped = await post(http, "/v1/completions", **asked, stop=["never this", stop])
    choice = stopped["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["text"] == text[: text.index(stop)]
    assert choice["token_ids"] == ids[: len(choice["token_ids"])]
    assert len(choice["token_ids"]) < 40
    chunks = await stream(http, "/v1/completions", **asked, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


async def test_stop_token_ids_end_the_answer_and_are_part_of_it(http: aiohttp.ClientSession) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    _, free = await post(http, "/v1/completions", **asked)
    ids = free["choices"][0]["token_ids"]
    _, stopped = await post(http, "/v1/completions", **asked, stop_token_ids=[ids[4]])
    choice = stopped["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(ids[4]) + 1]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ids[4]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"max_tokens": 3}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1, 10**9]}, "prompt"),
        ("/v1/completions", {"prompt": [1, True]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [2]]}, "prompt"),
        ("/v1/completions", {"prompt": [1], "n": 2}, "n"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": [1], "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": [1], "top_p": 0}, "top_p"),
        ("/v1/completions", {"prompt": [1], "logprobs": 5}, "logprobs"),
        ("/v1/completions", {"prompt": [1], "presence_penalty": 3.0}, "presence_penalty"),
        ("/v1/completions", {"prompt": [1], "logit_bias": {"100000": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": [1], "logit_bias": {"5": 101}}, "logit_bias"),
        ("/v1/completions", {"prompt": [1], "structured_outputs": {}}, "structured_outputs"),
        ("/v1/completions", {"prompt": [1], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            "/v1/completions",
            {"prompt": [1], "structured_outputs": {"json": '{"type": "strin"}'}},
            "structured_outputs",
        ),
        (
            "/v1/completions",
            {"prompt": [1], "structured_outputs": {"structural_tag": '{"format": {"type": "dance"}}'}},
            "structured_outputs",
        ),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("/tokenize", {}, "prompt"),
    ],
)
async def test_a_malformed_request_is_a_400_that_names_the_field(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], field: str
) -> None:
    status, answer = await post(http, path, **body)
    assert status == 400
    assert answer["error"]["param"] == field
    assert field in answer["error"]["message"]
    assert answer["error"]["code"] == 400


async def test_neutral_values_of_unsupported_fields_are_accepted(http: aiohttp.ClientSession) -> None:
    neutral = {"n": 1, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "user": "x"}
    status, _ = await post(http, "/v1/completions", prompt=PROMPT, max_tokens=1, **neutral)
    assert status == 200


async def test_a_body_that_is_not_json_is_a_400(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", data=b"{") as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]


async def test_an_unknown_model_or_route_is_a_404_in_json(http: aiohttp.ClientSession) -> None:
    status, body = await post(http, "/v1/completions", prompt=PROMPT, model="other")
    assert status == body["error"]["code"] == 404
    status, body = await post(http, "/v1/nothing")
    assert status == body["error"]["code"] == 404


@pytest.mark.parametrize(("length", "max_tokens"), [(CONTEXT, 1), (CONTEXT + 50, 1), (CONTEXT - 10, 11)])
async def test_what_does_not_fit_the_context_is_a_clear_400(
    http: aiohttp.ClientSession, length: int, max_tokens: int
) -> None:
    status, body = await post(http, "/v1/completions", prompt=[5] * length, max_tokens=max_tokens)
    assert status == 400
    assert "maximum context length" in body["error"]["message"]


async def test_the_whole_context_can_be_used(http: aiohttp.ClientSession) -> None:
    asked = {"prompt": [5] * (CONTEXT - 10), "max_tokens": 10, "ignore_eos": True}
    status, body = await post(http, "/v1/completions", **asked)
    assert status == 200
    assert body["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize("streams", [True, False])
async def test_a_disconnected_request_stops_and_frees_its_slot(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    started = asyncio.Event()
    step = server.scheduler.step
    steps = 0
    loop = asyncio.get_running_loop()

    def observed_step() -> Any:
        nonlocal steps
        steps += 1
        sampled = step()
        loop.call_soon_threadsafe(started.set)
        # The server gets a turn after every step: of 200 it hears in time that the client leaves.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        return sampled

    monkeypatch.setattr(server.scheduler, "step", observed_step)
    async with aiohttp.ClientSession(server.url) as leaving:
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": streams}
        request = asyncio.create_task(leaving.post("/v1/completions", json=body))
        await started.wait()
        assert server.scheduler.table.free == 3
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    async with asyncio.timeout(60):
        while server.scheduler.has_work:
            await server.worker.resume()
    assert steps < 200
    assert server.scheduler.table.free == 4


async def test_health_answers_while_the_model_computes(
    http: aiohttp.ClientSession, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = asyncio.Event()
    step = server.scheduler.step
    loop = asyncio.get_running_loop()

    def step_after_health() -> Any:
        # The step cannot go on before /health has answered, so it answered during the step.
        asyncio.run_coroutine_threadsafe(asyncio.wait_for(answered.wait(), 10), loop).result()
        return step()

    monkeypatch.setattr(server.scheduler, "step", step_after_health)
    generating = asyncio.create_task(post(http, "/v1/completions", prompt=PROMPT, max_tokens=1))
    async with http.get("/health") as response:
        assert response.status == 200
    answered.set()
    assert (await generating)[0] == 200


async def test_many_clients_at_once_get_their_own_answers(http: aiohttp.ClientSession) -> None:
    async def one(seed: int) -> list[int]:
        body = (
            await post(
                http, "/v1/completions", prompt=[seed, 5, 6], max_tokens=12, seed=seed, return_token_ids=True
            )
        )[1]
        assert body["choices"][0]["prompt_token_ids"] == [seed, 5, 6]
        ids: list[int] = body["choices"][0]["token_ids"]
        return ids

    together = await asyncio.gather(*(one(seed) for seed in range(12)))
    assert [await one(seed) for seed in range(12)] == together


def test_a_port_in_use_is_one_clear_line(tiny: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"port {port} on 127.0.0.1 is in use"):
            EmbeddedServer(tiny, port=port)
