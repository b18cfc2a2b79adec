"""The official clients of Azure, Vertex AI and Bedrock work against the gateway, given its address and a key.

Each plays the same two turns with a tool. What counts is that the client is content and that the second turn
extends the tokens of the first, as for the provider's own client.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import boto3
import openai
import pytest
from anthropic import AsyncAnthropicBedrock, AsyncAnthropicFoundry, AsyncAnthropicVertex
from botocore.config import Config
from botocore.exceptions import ClientError, EventStreamError
from google import genai
from google.genai import errors, types
from google.oauth2.credentials import Credentials
from openai import AsyncAzureOpenAI, AsyncOpenAI

from polar.engines.base import EngineError
from polar.gateway.server import new_key
from polar.models.completion import Completion
from tests.fakes.scripted_engine import Answer
from tests.gateways import CALL, MODEL, SCHEMA, Service, served

SAID = (CALL, "Two files.")
ASK: list[Any] = [{"role": "user", "content": "Look around."}]
FUNCTION = {"name": "bash", "description": "Execute a command.", "parameters": SCHEMA}
VERSION = "2024-10-21"


def azure(service: Service, **options: Any) -> AsyncAzureOpenAI:
    return AsyncAzureOpenAI(
        azure_endpoint=service.url,
        api_version=VERSION,
        max_retries=0,
        **({"api_key": service.key} if "azure_ad_token" not in options else {}) | options,
    )


def assert_one_conversation(completions: list[Completion]) -> None:
    first, second = completions
    assert [call.name for call in first.response.tool_calls] == ["bash"]
    assert second.parent == first.id
    before = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
    assert second.prompt_ids.tolist()[: len(before)] == before
    assert (second.messages[-1].content, second.response.content) == ("a\nb", "Two files.")


async def chat_with_a_tool(client: AsyncOpenAI, *, streamed: bool) -> None:
    messages = list(ASK)
    for _ in SAID:
        asked: Any = {
            "model": MODEL,
            "messages": messages,
            "tools": [{"type": "function", "function": FUNCTION}],
        }
        if streamed:
            async with client.chat.completions.stream(**asked) as stream:
                message = (await stream.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**asked)).choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "a\nb"} for call in message.tool_calls or ()
        ]
    assert messages[-1]["content"] == "Two files."


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("options", [{}, {"azure_deployment": MODEL}], ids=["endpoint", "deployment"])
async def test_azure_serves_chats_by_deployment(
    tmp_path: Path, streamed: bool, options: dict[str, Any]
) -> None:
    async with served(tmp_path, *SAID) as service, azure(service, **options) as client:
        await chat_with_a_tool(client, streamed=streamed)
        assert_one_conversation(await service.captured())


async def test_azure_takes_a_key_as_a_token_of_its_directory(tmp_path: Path) -> None:
    async with served(tmp_path, "Hello.") as service, azure(service, azure_ad_token=service.key) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=ASK)
        assert answer.choices[0].message.content == "Hello."


async def test_azure_serves_its_newer_address(tmp_path: Path) -> None:
    async with (
        served(tmp_path, *SAID) as service,
        AsyncOpenAI(base_url=f"{service.url}/openai/v1/", api_key=service.key, max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        await chat_with_a_tool(client, streamed=False)
        assert_one_conversation(await service.captured())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("options", [{}, {"azure_deployment": MODEL}], ids=["endpoint", "deployment"])
async def test_azure_serves_responses(tmp_path: Path, streamed: bool, options: dict[str, Any]) -> None:
    async with served(tmp_path, *SAID) as service, azure(service, **options) as client:
        given: list[Any] = list(ASK)
        for _ in SAID:
            asked: Any = {"model": MODEL, "input": given, "tools": [{"type": "function", **FUNCTION}]}
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            given += [
                item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output
            ]
            given += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "a\nb"}
                for item in answer.output
                if item.type == "function_call"
            ]
        assert answer.output_text == "Two files."
        assert_one_conversation(await service.captured())


async def test_azure_refuses_in_its_own_shape(tmp_path: Path) -> None:
    async with served(tmp_path) as service, azure(service) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.with_options(api_key=new_key()).chat.completions.create(model=MODEL, messages=ASK)
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-9", messages=ASK)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as malformed:
            await client.chat.completions.create(model=MODEL, messages=[])
        assert malformed.value.param == "messages"


async def test_a_deployment_may_have_slashes_in_its_name(tmp_path: Path) -> None:
    name = "Qwen/Qwen3-4B"
    async with served(tmp_path, "Hello.", name=name) as service:
        for options in ({}, {"azure_deployment": name}):
            async with azure(service, **options) as client:
                answer = await client.chat.completions.create(model=name, messages=ASK)
                assert (answer.model, answer.choices[0].message.content) == (name, "Hello.")


async def test_foundry_serves_messages(tmp_path: Path) -> None:
    async with (
        served(tmp_path, "Hello.") as service,
        AsyncAnthropicFoundry(base_url=service.url, api_key=service.key, max_retries=0) as client,
    ):
        answer = await client.messages.create(model=MODEL, max_tokens=9, messages=ASK)
        assert [block.type for block in answer.content] == ["text"]


def google(service: Service, **options: Any) -> genai.Client:
    given: dict[str, Any] = {
        "project": "p",
        "location": "us-central1",
        "credentials": Credentials(token=service.key),  # type: ignore[no-untyped-call]
    }
    return genai.Client(
        vertexai=True, http_options=types.HttpOptions(base_url=service.url), **options or given
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by_key", [False, True], ids=["credentials", "api_key"])
async def test_vertex_serves_google_s_models(tmp_path: Path, streamed: bool, by_key: bool) -> None:
    async with served(tmp_path, *SAID) as service:
        client = google(service, **({"api_key": service.key} if by_key else {}))
        config = types.GenerateContentConfig(
            tools=[
                types.Tool(
                    function_declarations=[
                        types.FunctionDeclaration(
                            name="bash", description="Execute a command.", parameters_json_schema=SCHEMA
                        )
                    ]
                )
            ],
        )
        chat = client.aio.chats.create(model=MODEL, config=config)
        sent: Any = "Look around."
        for _ in SAID:
            if streamed:
                answers = [answer async for answer in await chat.send_message_stream(sent)]
            else:
                answers = [await chat.send_message(sent)]
            calls = [call for answer in answers for call in answer.function_calls or ()]
            sent = [
                types.Part.from_function_response(name=call.name or "", response={"output": "a\nb"})
                for call in calls
            ]
        assert "".join(answer.text or "" for answer in answers) == "Two files."
        await client.aio.aclose()
        assert_one_conversation(await service.captured())


async def test_vertex_counts_and_lists_google_s_models(tmp_path: Path) -> None:
    async with served(tmp_path, "Hello.") as service:
        client = google(service)
        counted = await client.aio.models.count_tokens(model=MODEL, contents="How long?")
        await client.aio.models.generate_content(model=MODEL, contents="How long?")
        listed = [model.name async for model in await client.aio.models.list()]
        shown = await client.aio.models.get(model=MODEL)
        await client.aio.aclose()
        assert listed == [shown.name] == [f"models/{MODEL}"]
        (completion,) = await service.captured()
        assert counted.total_tokens == len(completion.prompt_ids)


async def test_vertex_refuses_as_google_does(tmp_path: Path) -> None:
    async with served(tmp_path) as service:
        client = google(service, api_key=new_key())
        with pytest.raises(errors.ClientError) as refused:
            await client.aio.models.generate_content(model=MODEL, contents="Hi")
        assert (refused.value.code, refused.value.status) == (401, "UNAUTHENTICATED")
        await client.aio.aclose()


def vertex(service: Service, key: str | None = None) -> AsyncAnthropicVertex:
    return AsyncAnthropicVertex(
        base_url=f"{service.url}/v1",
        region="us-east5",
        project_id="p",
        access_token=key or service.key,
        max_retries=0,
    )


async def messages_with_a_tool(client: Any, *, streamed: bool) -> None:
    messages = list(ASK)
    tool = {"name": "bash", "description": "Execute a command.", "input_schema": SCHEMA}
    for _ in SAID:
        asked: Any = {"model": MODEL, "max_tokens": 99, "messages": messages, "tools": [tool]}
        if streamed:
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        content = [block.model_dump(exclude={"parsed_output"}, exclude_none=True) for block in answer.content]
        messages.append({"role": "assistant", "content": content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "a\nb"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "user", "content": results}] if results else []
    assert answer.content[0].text == "Two files."


@pytest.mark.parametrize("streamed", [False, True])
async def test_vertex_serves_anthropic_s_models(tmp_path: Path, streamed: bool) -> None:
    async with served(tmp_path, *SAID) as service, vertex(service) as client:
        await messages_with_a_tool(client, streamed=streamed)
        assert_one_conversation(await service.captured())


async def test_vertex_counts_for_anthropic_s_models(tmp_path: Path) -> None:
    async with served(tmp_path, "Hello.") as service, vertex(service) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=ASK)
        await client.messages.create(model=MODEL, max_tokens=9, messages=ASK)
        (completion,) = await service.captured()
        assert counted.input_tokens == len(completion.prompt_ids)


async def test_vertex_refuses_as_anthropic_does(tmp_path: Path) -> None:
    async with served(tmp_path) as service:
        async with vertex(service, new_key()) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(model=MODEL, max_tokens=9, messages=ASK)
        async with vertex(service) as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="claude-9", max_tokens=9, messages=ASK)


BY_KEY = {"api_key": "{key}"}
SIGNED = {"aws_access_key": "{key}", "aws_secret_key": "any", "aws_session_token": "any"}


def bedrock(service: Service, credentials: dict[str, str], key: str | None = None) -> AsyncAnthropicBedrock:
    given: Any = {name: value.format(key=key or service.key) for name, value in credentials.items()}
    return AsyncAnthropicBedrock(base_url=service.url, aws_region="us-east-1", max_retries=0, **given)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("credentials", [BY_KEY, SIGNED], ids=["bearer", "signed"])
async def test_bedrock_serves_anthropic_s_models(
    tmp_path: Path, streamed: bool, credentials: dict[str, str]
) -> None:
    async with served(tmp_path, *SAID) as service, bedrock(service, credentials) as client:
        await messages_with_a_tool(client, streamed=streamed)
        assert_one_conversation(await service.captured())


async def test_bedrock_refuses_in_its_own_shape(tmp_path: Path) -> None:
    async with served(tmp_path, max_context=400) as service:
        for credentials in (BY_KEY, SIGNED):
            async with bedrock(service, credentials, new_key()) as stranger:
                with pytest.raises(anthropic.PermissionDeniedError) as refused:
                    await stranger.messages.create(model=MODEL, max_tokens=9, messages=ASK)
            assert refused.value.response.headers["x-amzn-ErrorType"] == "UnrecognizedClientException"
        async with bedrock(service, BY_KEY) as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="anthropic.claude-9", max_tokens=9, messages=ASK)
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(
                    model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "x " * 900}]
                )


def runtime(service: Service) -> Any:
    return boto3.client(
        "bedrock-runtime",
        endpoint_url=service.url,
        region_name="us-east-1",
        aws_access_key_id=service.key,
        aws_secret_access_key="any",
        config=Config(retries={"total_max_attempts": 1}),
    )


def invoked(**fields: Any) -> str:
    return json.dumps({"anthropic_version": "bedrock-2023-05-31", "max_tokens": 99, "messages": ASK} | fields)


async def test_boto3_invokes_models(tmp_path: Path) -> None:
    name = "us.anthropic/claude:1"
    async with served(tmp_path, "Hello, wörld 🙂.", name=name) as service:
        client = runtime(service)

        def whole() -> Any:
            return json.loads(client.invoke_model(modelId=name, body=invoked())["body"].read())

        def events() -> list[Any]:
            stream = client.invoke_model_with_response_stream(modelId=name, body=invoked())["body"]
            return [json.loads(event["chunk"]["bytes"]) for event in stream]

        assert (await asyncio.to_thread(whole))["content"] == [{"type": "text", "text": "Hello, wörld 🙂."}]
        seen = await asyncio.to_thread(events)
        assert [seen[0]["type"], seen[-1]["type"]] == ["message_start", "message_stop"]
        texts = [event["delta"]["text"] for event in seen if event["type"] == "content_block_delta"]
        assert (len(texts) > 2, "".join(texts)) == (True, "Hello, wörld 🙂.")
        assert len(await service.captured()) == 2


async def test_boto3_raises_what_bedrock_would(tmp_path: Path) -> None:
    failing = Answer("One two three", failure=EngineError("gone"), fail_at=2)
    async with served(tmp_path, failing) as service:
        client = runtime(service)

        def events() -> list[Any]:
            return list(client.invoke_model_with_response_stream(modelId=MODEL, body=invoked())["body"])

        with pytest.raises(EventStreamError, match="internalServerException"):
            await asyncio.to_thread(events)
        with pytest.raises(ClientError) as refused:
            await asyncio.to_thread(client.invoke_model, modelId=MODEL, body=invoked(messages=[]))
        assert refused.value.response["Error"]["Code"] == "ValidationException"
        assert "messages" in refused.value.response["Error"]["Message"]
