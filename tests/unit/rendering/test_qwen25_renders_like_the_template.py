"""Qwen2.5 in tokens gives the ids of transformers' `apply_chat_template`, and extends them exactly."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from polar.rendering.tool_calls import assistant_text
from tests.tokenizers_of_families import QWEN25
from tests.turns import read_turn

Template = Callable[[Sequence[Message], Sequence[ToolDefinition], bool], list[int]]

# Hypothesis also tries strings of our own source; a control token is one to the template, not to us.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    lambda text: re.search(r"<\|\w+\|>", text) is None
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)
NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
CALLS = st.builds(
    lambda name, given: ToolCall("call_0", name, json.dumps(given, ensure_ascii=False)),
    NAMES,
    st.dictionaries(TEXTS, VALUES, max_size=3),
)
TOOLS = st.lists(
    st.builds(ToolDefinition, NAMES, TEXTS, st.fixed_dictionaries({"type": st.just("object"), "x": VALUES})),
    max_size=2,
)
WRITTEN = st.builds(
    lambda text, calls: Message(Role.ASSISTANT, text, tool_calls=tuple(calls)),
    TEXTS,
    st.lists(CALLS, max_size=2),
)
ANSWERS = WRITTEN.map(lambda answer: replace(answer, content=answer.content.lstrip()))
"""The header ends with a line break, and the policy never sees one merged with what it writes itself."""
HEARD = st.lists(st.builds(Message, st.sampled_from([Role.USER, Role.TOOL]), TEXTS), min_size=1, max_size=3)
TURNS, SAMPLED = (st.lists(st.tuples(said, HEARD), max_size=3) for said in (WRITTEN, ANSWERS))


@pytest.fixture(scope="module")
def qwen25() -> Renderer:
    return renderer_for("any name", QWEN25.directory())


@pytest.fixture(scope="module")
def template() -> Template:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(QWEN25.directory())

    def apply(
        messages: Sequence[Message], tools: Sequence[ToolDefinition], prompts: bool = True
    ) -> list[int]:
        ids: list[int] = reference.apply_chat_template(
            [_turn(message) for message in messages],
            tools=[_tool(tool) for tool in tools] or None,
            add_generation_prompt=prompts,
        )["input_ids"]
        return ids

    return apply


@settings(max_examples=150)
@given(st.one_of(st.none(), TEXTS), TEXTS, TURNS, TOOLS)
def test_any_conversation_gives_the_ids_of_the_template(
    qwen25: Renderer,
    template: Template,
    system: str | None,
    asked: str,
    turns: list[tuple[Message, list[Message]]],
    tools: list[ToolDefinition],
) -> None:
    messages = [] if system is None else [Message(Role.SYSTEM, system)]
    messages.append(Message(Role.USER, asked))
    for answer, heard in turns:
        messages += [answer, *heard]
    assert qwen25.render(messages, tools) == template(messages, tools, True)


@settings(max_examples=100)
@given(TEXTS, SAMPLED.filter(bool), TOOLS)
def test_extensions_give_what_the_template_gives_of_the_whole(
    qwen25: Renderer,
    template: Template,
    asked: str,
    turns: list[tuple[Message, list[Message]]],
    tools: list[ToolDefinition],
) -> None:
    messages = [Message(Role.USER, asked)]
    ids = qwen25.render(messages, tools)
    for answer, heard in turns:
        sampled = [*(qwen25.opened(assistant_text(answer)) or []), qwen25.stop_token_ids[0]]
        messages.append(answer)
        bridge = qwen25.bridge(ids, sampled, heard, history=messages, tools=tools)
        assert bridge is not None
        ids = ids + sampled + bridge
        messages += heard
    assert ids == template(messages, tools, True)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 151_642), min_size=1, max_size=30), HEARD)
def test_sampled_tokens_are_never_tokenised_again(
    qwen25: Renderer, sampled: list[int], heard: list[Message]
) -> None:
    """Whatever a policy samples: the extension depends on how the turn ended, not on its tokens."""
    asked = [Message(Role.USER, "Hi")]
    prompt, history = qwen25.render(asked, ()), [*asked, Message(Role.ASSISTANT, "Yes")]
    end = qwen25.stop_token_ids[0]
    cut, ended, other = (
        qwen25.bridge(prompt, ids, heard, history=history) for ids in (sampled, [*sampled, end], [0, end])
    )
    assert ended == other
    assert cut == [end, *(ended or [])]


@settings(max_examples=100)
@given(ANSWERS)
@example(Message(Role.ASSISTANT, "", tool_calls=(ToolCall("call_0", "look", '{"at": "\uf900"}'),)))
def test_turns_parse_back_to_what_they_said(qwen25: Renderer, answer: Message) -> None:
    if "<tool_call>" in answer.content:
        return
    ids = [*(qwen25.opened(assistant_text(answer)) or []), qwen25.stop_token_ids[0]]
    read = read_turn(qwen25.parser(), *([id] for id in ids))
    # The tokenizer composes characters before it looks at them.
    assert [(call.name, json.loads(call.arguments)) for call in read.tool_calls] == [
        (call.name, json.loads(normalize("NFC", call.arguments))) for call in answer.tool_calls
    ]


def _turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in message.tool_calls
        ]
    return turn


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
