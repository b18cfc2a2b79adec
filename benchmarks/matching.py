"""What finding a conversation and extending its tokens costs, at 100,000 tokens of history.

    python -m benchmarks.matching

Each request comes as a harness sends it: the whole history again, in new strings, calls re-serialised.
The cost of tokenising the new messages alone is taken off; what is left is what Polar adds.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.weights import ensure_model
from polar.gateway.conversation import Conversations
from polar.gateway.source import render
from polar.models.chat import ChatRequest, Message, Role, ToolCall, ToolDefinition
from polar.models.completion import Ids
from polar.recordings.growth import GrowingTree, Turn
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for

T = TypeVar("T")

TOKENS = 100_000
REPEATS = 60
SENTENCE = "The file src/main.py has 42 lines and the test that failed names none of them. "
TOOLS = tuple(
    ToolDefinition(
        f"tool_{number}",
        "Does one of the things that a coding agent has to do. " * 12,
        {
            "type": "object",
            "properties": {
                f"option_{option}": {"type": "string", "description": SENTENCE} for option in range(8)
            },
        },
    )
    for number in range(12)
)
"""About as much JSON as a coding harness sends."""


def measure() -> dict[str, float]:
    """Milliseconds a request at 400 turns and at 50, the part of them that is matching, and the ratio."""
    renderer = renderer_for("x", ensure_model(DEFAULT_MODEL), tool_prompt=True)
    many_find, many = _cost(renderer, 400)
    few_find, few = _cost(renderer, 50)
    return {
        "history_tokens": TOKENS,
        "added_ms_at_400_turns": many,
        "added_ms_at_50_turns": few,
        "find_ms_at_400_turns": many_find,
        "find_ms_at_50_turns": few_find,
        "ratio_400_to_50_turns": many / few,
    }


def _cost(renderer: Renderer, turns: int) -> tuple[float, float]:
    conversations, last = _conversation(turns)
    new = (Message(Role.TOOL, "ok", tool_call_id=last.messages[-1].tool_calls[0].id),)
    find: list[float] = []
    extend: list[float] = []
    for _ in range(REPEATS):
        request = _as_echoed((*last.messages, *new))
        extension, spent = _timed(partial(conversations.find, request.messages, request.tools))
        assert extension.turn is last
        prompt, rendered = _timed(partial(render, request, extension, renderer))
        assert len(prompt.ids) > TOKENS
        find.append(spent)
        extend.append(spent + rendered)
    short: Ids = last.prompt_ids()[-16:]
    added = renderer.bridge(short, short, new, history=last.messages[-1:]) or ()
    text = b"".join(map(renderer.spelling, added)).decode()
    tokenising = [_timed(partial(renderer.raw.ids, text))[1] for _ in range(REPEATS)]
    return _usual(find), _usual(extend) - _usual(tokenising)


def _usual(samples: list[float]) -> float:
    """The lowest tenth: what it costs while nothing else has the core and its caches."""
    return statistics.quantiles(samples, n=10)[0]


def _conversation(turns: int) -> tuple[Conversations, Turn]:
    """A session's single conversation; tokens are made up, texts are as long as such tokens would be."""
    conversations = Conversations()
    each = TOKENS // turns
    messages: tuple[Message, ...] = (Message(Role.SYSTEM, SENTENCE * 100), Message(Role.USER, "Fix it."))
    tree, turn = GrowingTree(), None
    for number in range(turns):
        call = ToolCall(f"call_{number}", "tool_1", json.dumps({"option_1": SENTENCE, "lines": number}))
        messages = (*messages, Message(Role.ASSISTANT, f"Step {number}.", tool_calls=(call,)))
        ids = np.full(each // 2 + 1, number, np.int32)
        prompt = np.concatenate([turn.ids(), ids]) if turn is not None else ids
        hints = [turn.completion_id if turn is not None else None]
        turn = tree.add(tree.prove(f"c{number}", prompt, ids, messages, hints=hints))
        conversations.add(turn, TOOLS)
        result = f"{number} " + SENTENCE * (each // 20)
        messages = (*messages, Message(Role.TOOL, result, tool_call_id=call.id))
    assert turn is not None
    return conversations, turn


def _as_echoed(messages: Sequence[Message]) -> ChatRequest:
    """The same messages from other JSON: no string is the one that was kept."""
    return ChatRequest("m", tuple(_copied(message) for message in messages), _tools())


def _copied(message: Message) -> Message:
    calls = tuple(
        replace(call, arguments=json.dumps(json.loads(call.arguments), separators=(",", ":")))
        for call in message.tool_calls
    )
    return replace(message, content=message.content.encode().decode(), tool_calls=calls)


def _tools() -> tuple[ToolDefinition, ...]:
    return tuple(replace(tool, parameters=json.loads(json.dumps(tool.parameters))) for tool in TOOLS)


def _timed(act: Callable[[], T]) -> tuple[T, float]:
    gc.disable()
    try:
        begun = time.perf_counter()
        done = act()
        return done, (time.perf_counter() - begun) * 1000
    finally:
        gc.enable()


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name:24} {value:10.3f}")
