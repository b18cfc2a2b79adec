"""One scripted agent, played through all four dialects by their official SDKs, gives the same traces.

The agent thinks, calls tools in parallel, meets an engine that fails, hands work to a sub-agent, and
compacts its context. The SDKs reshape what they were told, each in its own way; nothing of that may reach
the tokens.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from anthropic import AnthropicError, AsyncAnthropic
from google import genai
from google.genai import types
from google.genai.errors import APIError as GoogleError
from openai import AsyncOpenAI, LengthFinishReasonError, OpenAIError
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL, GatewaySettings
from polar.engines.base import EngineError
from polar.engines.embedded.weights import ensure_model
from polar.gateway.playback import Playback
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.chat import FinishReason
from polar.models.completion import Completion
from polar.models.session import Origin
from polar.models.task import Budgets, OnDivergence, SamplingPin
from polar.trajectory.materialise import materialise
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow, read_capture
from tests.fakes.scripted_engine import Answer, Script, ScriptedEngine
from tests.fakes.thinking_renderer import thinking_renderer

MODEL = "scripted"
FAILURES = (OpenAIError, AnthropicError, GoogleError, RuntimeError)
"""What an SDK raises when the engine has failed."""
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "seconds": {"type": "number"}},
    "required": ["command"],
}


def called(**arguments: Any) -> str:
    body = json.dumps({"name": "bash", "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


SCRIPT: list[Script] = [
    # The main agent: two calls at once, with numbers that JavaScript writes in another way.
    "Which files are there?\nI look — né?\n"
    + called(command="ls «α»", seconds=1.0, deep={"b": [True, None], "a": 1e3})
    + "\n"
    + called(seconds=12345678901234567890, command="cat 🚀.txt"),
    # The sub-agent, between two turns of the main one.
    "A small task.\n" + called(command="pwd"),
    "Done.\nIt is done.  ",
    EngineError("out of memory"),
    "Now I know.\n" + called(command='printf "\\n"'),
    Answer("Going on.\nThis is cut sh", ends=False),
    "And so on.\nNow it is whole.",
    # After the compaction.
    "From the summary.\n" + called(command="make"),
    "All good.\nAll is well.",
]


@dataclass(frozen=True)
class Call:
    id: str
    name: str


class Agent(ABC):
    """One conversation in a provider's own objects, as its SDK gives and takes them."""

    def __init__(self, client: Any, system: str, asked: str, *, streamed: bool) -> None:
        self.client = client
        self.system = system
        self.streamed = streamed
        self.history: list[Any] = []
        self.hear(asked)

    @abstractmethod
    def hear(self, text: str) -> None: ...

    @abstractmethod
    def results(self, calls: Sequence[Call], texts: Sequence[str]) -> None: ...

    @abstractmethod
    async def ask(self) -> list[Call]:
        """Let the model speak, keep what it said, and return its calls."""


class ChatAgent(Agent):
    def hear(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, calls: Sequence[Call], texts: Sequence[str]) -> None:
        self.history += [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": text}]}
            for call, text in zip(calls, texts, strict=True)
        ]

    async def ask(self) -> list[Call]:
        function = {"name": "bash", "description": "Run.", "parameters": SCHEMA}
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "developer", "content": self.system}, *self.history],
            "tools": [{"type": "function", "function": function}],
        }
        if self.streamed:
            async with self.client.chat.completions.stream(**asked) as stream:
                try:
                    message = (await stream.get_final_completion()).choices[0].message
                except LengthFinishReasonError as cut:
                    message = cut.completion.choices[0].message
        else:
            message = (await self.client.chat.completions.create(**asked)).choices[0].message
        said = {"role": "assistant", "content": (message.content or "").strip()}
        calls = message.tool_calls or []
        told = [
            {
                "id": call.id,
                "type": "function",
                # As harnesses in JavaScript do it.
                "function": {
                    "name": call.function.name,
                    "arguments": json.dumps(json.loads(call.function.arguments), separators=(",", ":")),
                },
            }
            for call in calls
        ]
        if told and said["content"]:
            self.history += [said, {"role": "assistant", "content": None, "tool_calls": told}]
        else:
            self.history.append(said | ({"tool_calls": told} if told else {}))
        return [Call(call.id, call.function.name) for call in calls]


class ResponsesAgent(Agent):
    def hear(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, calls: Sequence[Call], texts: Sequence[str]) -> None:
        self.history += [
            {"type": "function_call_output", "call_id": call.id, "output": text}
            for call, text in zip(calls, texts, strict=True)
        ]

    async def ask(self) -> list[Call]:
        asked: dict[str, Any] = {
            "model": MODEL,
            "instructions": self.system,
            "input": self.history,
            "include": ["reasoning.encrypted_content"],
            "tools": [{"type": "function", "name": "bash", "description": "Run.", "parameters": SCHEMA}],
        }
        if self.streamed:
            events = [event async for event in await self.client.responses.create(**asked, stream=True)]
            response = events[-1].response
            if response.error is not None:
                raise RuntimeError(response.error.message)
        else:
            response = await self.client.responses.create(**asked)
        self.history += [item.to_dict() for item in response.output]
        return [Call(item.call_id, item.name) for item in response.output if item.type == "function_call"]


class MessagesAgent(Agent):
    def hear(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, calls: Sequence[Call], texts: Sequence[str]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": text}]}
            for call, text in zip(calls, texts, strict=True)
        ]
        self.history.append({"role": "user", "content": blocks[::-1]})  # as they end, not as they were asked

    async def ask(self) -> list[Call]:
        # The system prompt flips between its two forms, as Claude Code's does.
        block = {"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 500,
            "system": self.system if len(self.history) % 4 == 1 else [block],
            "messages": self.history,
            "tools": [{"name": "bash", "description": "Run.", "input_schema": SCHEMA}],
        }
        if self.streamed:
            async with self.client.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        else:
            message = await self.client.messages.create(**asked)
        content = [
            block.model_dump(exclude={"parsed_output"}, exclude_none=True) for block in message.content
        ]
        self.history.append({"role": "assistant", "content": content})
        return [Call(block.id, block.name) for block in message.content if block.type == "tool_use"]


class GoogleAgent(Agent):
    def hear(self, text: str) -> None:
        self.history.append(types.UserContent(text))

    def results(self, calls: Sequence[Call], texts: Sequence[str]) -> None:
        parts = [
            types.Part.from_function_response(name=call.name, response={"output": text})
            for call, text in zip(calls, texts, strict=True)
        ]
        self.history.append(types.Content(role="user", parts=parts))

    async def ask(self) -> list[Call]:
        tool = types.FunctionDeclaration(name="bash", description="Run.", parameters_json_schema=SCHEMA)
        config = types.GenerateContentConfig(
            system_instruction=self.system,
            max_output_tokens=500,
            tools=[types.Tool(function_declarations=[tool])],
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        )
        models = self.client.aio.models
        asked = {"model": MODEL, "contents": self.history, "config": config}
        if self.streamed:
            answers = [chunk async for chunk in await models.generate_content_stream(**asked)]
        else:
            answers = [await models.generate_content(**asked)]
        parts = [part for answer in answers for part in answer.parts or []]
        self.history.append(types.Content(role="model", parts=parts))
        return [Call("", part.function_call.name) for part in parts if part.function_call]


@cache
def tokenizer_file() -> Path:
    return ensure_model(DEFAULT_MODEL) / "tokenizer.json"


@asynccontextmanager
async def session(
    directory: Path, playback: Playback | None
) -> AsyncIterator[tuple[str, SessionGrant, Gateway]]:
    script = SCRIPT if playback is None else []
    engine = ScriptedEngine(Tokenizer.from_file(str(tokenizer_file())), script)
    renderer = thinking_renderer(tokenizer_file().parent)
    async with Gateway(GatewaySettings(), engine, renderer, engine.info) as gateway:
        capture = directory / "capture"
        grant = SessionGrant("s1", new_key(), capture, SamplingPin(), Budgets(), playback=playback)
        gateway.open_session(grant)
        yield f"http://{gateway.host}:{gateway.port}", grant, gateway


async def played(kind: type[Agent], client: Any, *, streamed: bool, fails: bool) -> None:
    """The whole story, in whoever's words; `fails`: with the failure in it."""

    def agent(system: str, asked: str) -> Agent:
        return kind(client, system, asked, streamed=streamed)

    main = agent("You are the main agent.", "Fix the tests, s'il te plaît.")
    first = await main.ask()
    assert len(first) == 2
    helper = agent("You are a sub-agent.", "Where am I?")
    helper.results(await helper.ask(), ["/work"])
    assert await helper.ask() == []
    main.results(first, ["α\nβ", "🚀 12345678901234567890"])
    main.hear("Go on.")
    if fails:
        with pytest.raises(FAILURES):
            await main.ask()
    main.results(await main.ask(), [""])
    assert await main.ask() == []
    main.hear("You were cut off.")
    assert await main.ask() == []
    compacted = agent("You are the main agent.", "Summary: the tests are nearly fixed.")
    compacted.results(await compacted.ask(), ["ok"])
    assert await compacted.ask() == []


def clients(url: str, key: str, stack: AsyncExitStack) -> dict[str, Callable[[], Any]]:
    options = types.HttpOptions(base_url=url)
    return {
        "openai_chat": lambda: AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0),
        "openai_responses": lambda: AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0),
        "anthropic_messages": lambda: AsyncAnthropic(base_url=url, api_key=key, max_retries=0),
        "google_generate": lambda: genai.Client(api_key=key, http_options=options),
    }


AGENTS: dict[str, type[Agent]] = {
    "openai_chat": ChatAgent,
    "openai_responses": ResponsesAgent,
    "anthropic_messages": MessagesAgent,
    "google_generate": GoogleAgent,
}


async def recorded(
    dialect: str, directory: Path, *, streamed: bool, playback: Playback | None = None
) -> list[Completion]:
    async with session(directory, playback) as (url, grant, gateway), AsyncExitStack() as stack:
        client = clients(url, grant.key, stack)[dialect]()
        if isinstance(client, genai.Client):
            stack.push_async_callback(client.aio.aclose)
            stack.callback(client.close)
        else:
            await stack.enter_async_context(client)
        await played(AGENTS[dialect], client, streamed=streamed, fails=playback is None)
        await gateway.close_session("s1")
        return read_capture(grant.capture)


def told(completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """A recording without the names that are made up anew in every session."""
    place = {completion.id: index for index, completion in enumerate(completions)}
    return [
        {
            "prompt": completion.prompt_ids.tolist(),
            "sampled": completion.sampled_ids.tolist(),
            "logprobs": completion.logprobs.tolist(),
            "finish": completion.finish_reason,
            "parent": place.get(completion.parent or ""),
            "follows": place.get(completion.follows or ""),
            "tools": completion.tools,
        }
        for completion in completions
    ]


def traces(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    trajectory = PrefixMerging(PrefixMerging.Options()).build(grow(completions))
    return [
        (trace.prompt_ids.tolist(), trace.response_ids.tolist(), trace.loss_mask.tolist(), trace.lineage)
        for trace in (materialise(trajectory, ref) for ref in trajectory.traces)
    ]


async def test_every_dialect_records_the_same_tokens(tmp_path: Path) -> None:
    recordings: dict[str, list[Completion]] = {}
    for dialect in AGENTS:
        for streamed in (False, True):
            name = f"{dialect}-{streamed}"
            recordings[name] = await recorded(dialect, tmp_path / name, streamed=streamed)
    expected = told(recordings["openai_chat-False"])
    # The fourth failed before its first token: recorded without a prompt, it extends nobody's tokens.
    assert [turn["parent"] for turn in expected] == [None, None, 1, None, 0, 4, 5, None, 7]
    assert [turn["follows"] for turn in expected] == [None, None, 1, 0, 0, 4, 5, None, 7]
    for name, recording in recordings.items():
        assert told(recording) == expected, name
    built = traces(recordings["openai_chat-False"])
    assert len(built) == 3
    for name, recording in recordings.items():
        assert traces(recording) == built, name


@pytest.mark.parametrize("dialect", AGENTS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_every_dialect_is_given_the_same_answers_again(
    tmp_path: Path, dialect: str, streamed: bool
) -> None:
    """And no engine is asked. The call that failed was no answer, and is not repeated."""
    original = await recorded(dialect, tmp_path / "original", streamed=streamed)
    origin = Origin(session_id="s0", samples_on=False, on_divergence=OnDivergence.STOP)
    playback = Playback(grow(original), origin, "s1")
    again = await recorded(dialect, tmp_path / "again", streamed=streamed, playback=playback)
    assert (playback.report.calls, playback.report.is_faithful) == (8, True), playback.report
    answered = [it for it in original if it.finish_reason is not FinishReason.ERROR]
    assert told(again) == told(answered)
    assert [it.id for it in again] == [it.id for it in answered]
