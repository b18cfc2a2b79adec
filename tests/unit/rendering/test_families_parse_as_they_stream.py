"""Real families: a turn reads the same in whatever pieces its tokens come, and text flows before its end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.models.chat import Message, ToolCall
from polar.rendering.adapter import AdaptedRenderer
from polar.rendering.base import MessageDelta, ResponseParser
from polar.rendering.families import renderer_for
from polar.rendering.template_renderer import TemplateRenderer
from tests.tokenizers_of_families import LLAMA, MISTRAL, QWEN3
from tests.turns import read_turn

MARKS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "<|python_tag|>"),
]
PIECES = st.one_of(
    st.sampled_from(MARKS),
    st.sampled_from(
        [" ", "\n", "\n\n", "{", "}", '{"name": "f", "arguments": {"a": 1}}', "function", "<thi"]
    ),
    st.sampled_from(['{"name": "f", "parameters": {"a": 1}}', 'f\n```json\n{"a": 1}\n```', "👩🏽‍🚀", "né"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)


FAMILIES = {family.name: renderer_for("x", family.directory()) for family in (QWEN3, LLAMA, MISTRAL)}


def by_template(name: str) -> TemplateRenderer:
    renderer = FAMILIES[name]
    assert isinstance(renderer, TemplateRenderer)
    return renderer


def sampled(family: TemplateRenderer, text: str) -> list[int]:
    """The ids of a text in which control tokens count."""
    return family.tokens.ids(text)


def read(parser: ResponseParser, ids: list[int], cuts: list[int]) -> Message:
    ends = [*sorted(cuts), len(ids)]
    return read_turn(parser, *(ids[start:end] for start, end in zip([0, *ends], ends, strict=False)))


@settings(max_examples=150)
@given(st.lists(PIECES, max_size=8), st.lists(st.integers(0, 40), max_size=5), st.integers(0, 3))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_stream_gives_what_the_whole_gives(
    name: str, pieces: list[str], cuts: list[int], lost: int
) -> None:
    family = by_template(name)
    ids = sampled(family, "".join(pieces))
    ids = ids[: len(ids) - lost]  # a limit may cut inside a character
    assert read(family.parser(), ids, cuts) == read(family.parser(), ids, [])


def test_thoughts_and_text_flow_before_the_turn_is_over() -> None:
    qwen3 = by_template("qwen3")
    parser = qwen3.parser()
    assert parser.feed(sampled(qwen3, "<think>\nlet me")).reasoning == "let me"
    assert parser.feed(sampled(qwen3, " see\n</think>\n\nI will")) == MessageDelta("I will", " see")
    assert parser.feed(sampled(qwen3, " look")).content == " look"
    assert parser.reasoning_tokens == 7
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    assert parser.feed(sampled(qwen3, f"\n{call}")).tool_calls == (ToolCall("", "f", "{}"),)
    assert not parser.finish()


def test_a_bare_call_of_llama_is_never_shown_as_text() -> None:
    llama = by_template("llama-3")
    parser = llama.parser()
    assert not parser.feed(sampled(llama, '{"name": "bash", "parameters": {"command": "ls"}}<|eot_id|>'))
    assert parser.finish() == MessageDelta(tool_calls=(ToolCall("", "bash", '{"command": "ls"}'),))


def test_text_that_begins_like_a_call_and_is_none_stays_content() -> None:
    llama = by_template("llama-3")
    assert read(llama.parser(), sampled(llama, '{"a": 1} is JSON'), []).content == '{"a": 1} is JSON'


def test_the_package_reads_calls_when_the_turn_is_over(deepseek: AdaptedRenderer) -> None:
    parser = deepseek.parser()
    call = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    calls = call.format("a", '{"x": 1}') + call.format("b", '{"y": "é"}')
    text = f"On it.<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    assert not parser.feed(deepseek.raw.ids(text))
    whole = parser.finish()
    assert whole.content == "On it."
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [
        ("a", '{"x": 1}'),
        ("b", '{"y": "é"}'),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_half_character_is_ever_shown(name: str) -> None:
    family = by_template(name)
    parser = family.parser()
    shown = [parser.feed([id]).content for id in sampled(family, "ok 👩🏽‍🚀 漢字 é")]
    assert "".join(shown) == "ok 👩🏽‍🚀 漢字 é"
    assert all("\ufffd" not in text for text in shown)
