"""Two renderers of one thing: ChatML's own gives what the model's template gives, in ids and in reading.

They part where the template has the last word: an answer that begins with white space stands right after its
header, and the name of a function is shown as it is, also where it is no JSON string.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.weights import ensure_model
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.chatml import ChatML
from polar.rendering.families import renderer_for
from polar.rendering.template_renderer import TemplateRenderer
from polar.rendering.tool_calls import assistant_text
from tests.tokenizers_of_families import QWEN25

CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "\n", "  "]
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(CONTROL), max_size=4
).map("".join)
SAID = TEXTS.map(str.lstrip)
NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)
ARGUMENTS = st.one_of(
    st.dictionaries(TEXTS, VALUES, max_size=3).map(lambda given: json.dumps(given, ensure_ascii=False)),
    st.dictionaries(TEXTS, VALUES, max_size=3).map(json.dumps),
    st.sampled_from(["", " ", "no JSON", '{"a": "raw\nline"}', '{"a": "\\ud83d"}', '{"a":1,"a":2}']),
)
SCHEMAS = st.dictionaries(
    st.sampled_from(["command", "path", "x"]),
    st.sampled_from(
        [{"type": "string"}, {"type": "integer"}, {"enum": ["a", 1]}, {"anyOf": [{"type": "string"}]}]
    ),
    max_size=3,
).map(lambda properties: {"type": "object", "properties": properties, "required": [*properties][:1]})
TOOLS = st.lists(st.builds(ToolDefinition, NAMES, TEXTS, SCHEMAS), max_size=2)
CALLS = st.builds(ToolCall, st.sampled_from(["call_0", "call_1"]), NAMES, ARGUMENTS)
ANSWERS = st.builds(
    lambda text, thought, calls: Message(Role.ASSISTANT, text, thought, tuple(calls)),
    SAID, st.none() | TEXTS, st.lists(CALLS, max_size=2),
)  # fmt: skip
HEARD = st.builds(Message, st.sampled_from([Role.USER, Role.SYSTEM]), TEXTS) | st.builds(
    lambda text, id: Message(Role.TOOL, text, tool_call_id=id),
    TEXTS,
    st.sampled_from(["call_0", "call_1", "call_2", None]),
)
NEW = st.lists(HEARD, max_size=3)
CONVERSATIONS = st.lists(HEARD | ANSWERS, min_size=1, max_size=6)


@dataclass(frozen=True, repr=False)
class Pair:
    old: ChatML
    new: TemplateRenderer


@pytest.fixture(scope="module", params=["smollm2", "smollm2 with a tool prompt", "qwen2.5"])
def pair(request: pytest.FixtureRequest) -> Pair:
    directory = QWEN25.directory() if request.param == "qwen2.5" else ensure_model(DEFAULT_MODEL)
    is_ours = "prompt" in request.param
    old, new = (
        renderer_for("x", directory, family=family, tool_prompt=is_ours) for family in (None, "template")
    )
    assert isinstance(old, ChatML)
    assert isinstance(new, TemplateRenderer)
    return Pair(old, new)


MANY = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@MANY
@given(CONVERSATIONS, TOOLS)
def test_prompts_are_the_same_ids(pair: Pair, messages: list[Message], tools: list[ToolDefinition]) -> None:
    assert pair.new.render(messages, tools) == pair.old.render(messages, tools)


@MANY
@given(CONVERSATIONS, ANSWERS, NEW, TOOLS, st.booleans())
def test_extensions_are_the_same_ids(
    pair: Pair,
    before: list[Message],
    turn: Message,
    new: list[Message],
    tools: list[ToolDefinition],
    ended: bool,
) -> None:
    prompt = pair.old.render(before, tools)
    sampled = [*(pair.old.opened(assistant_text(turn)) or []), *pair.old.stop_token_ids[:ended]]
    expected = pair.old.bridge(prompt, sampled, new)
    assert pair.new.bridge(prompt, sampled, new, history=[*before, turn], tools=tools) == expected


@MANY
@given(TEXTS)
def test_answers_are_begun_with_the_same_ids(pair: Pair, text: str) -> None:
    assert pair.new.opened(text) == pair.old.opened(text)


PIECES = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "b"}}', "{", "}", '"', "<|im_end|>"]
    )
    | TEXTS,
    max_size=8,
).map("".join)  # fmt: skip


@MANY
@given(PIECES, st.lists(st.integers(0, 49151), max_size=8), st.integers(1, 4), st.booleans())
def test_answers_are_read_alike_piece_by_piece(
    pair: Pair, text: str, more: list[int], size: int, ended: bool
) -> None:
    ids = [*(pair.old.opened(text) or []), *more, *pair.old.stop_token_ids[-1:][:ended]]
    old, new = pair.old.parser(), pair.new.parser()
    for n in range(0, len(ids), size):
        assert new.feed(ids[n : n + size]) == old.feed(ids[n : n + size])
    assert new.finish() == old.finish()
    assert new.message == old.message


def test_the_rest_is_the_same(pair: Pair) -> None:
    assert pair.new.stop_token_ids == pair.old.stop_token_ids
    assert (pair.new.form, pair.new.call_form) == (pair.old.form, pair.old.call_form)
