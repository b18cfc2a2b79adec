"""Real families: a turn reads the same in whatever pieces its tokens come, and text flows before its end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.models.chat import Message, Role, ToolCall
from polar.rendering.adapter import AdaptedParser, AdaptedRenderer, WholeParser

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


def sampled(family: AdaptedRenderer, text: str) -> list[int]:
    """The ids of a text in which control tokens count."""
    tokenizer = family._tokens._tokenizer
    tokenizer.encode_special_tokens = False
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids
    finally:
        tokenizer.encode_special_tokens = True


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=8), st.lists(st.integers(0, 40), max_size=5), st.integers(0, 3))
def test_a_stream_gives_what_the_whole_gives(
    family: AdaptedRenderer, caplog: pytest.LogCaptureFixture, pieces: list[str], cuts: list[int], lost: int
) -> None:
    ids = sampled(family, "".join(pieces))
    ids = ids[: len(ids) - lost]  # a limit may cut inside a character
    whole = WholeParser(family._read_with(()))
    whole.feed(ids)
    whole.finish()
    stream = family.parser()
    assert isinstance(stream, AdaptedParser)
    deltas = []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(ids)], strict=True):
        deltas.append(stream.feed(ids[start:end]))
    deltas.append(stream.finish())
    assert stream.message == whole.message
    assert "".join(delta.content for delta in deltas) == whole.message.content
    assert "".join(delta.reasoning for delta in deltas) == (whole.message.reasoning or "")
    assert sum((delta.tool_calls for delta in deltas), ()) == whole.message.tool_calls
    assert not caplog.records


def test_thoughts_and_text_flow_before_the_turn_is_over(qwen3: AdaptedRenderer) -> None:
    parser = qwen3.parser()
    assert parser.feed(sampled(qwen3, "<think>\nlet me")).reasoning == "let me"
    assert parser.feed(sampled(qwen3, " see\n</think>\n\nI will")).reasoning == " see"
    assert parser.feed(sampled(qwen3, " look")).content == " look"
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    assert not parser.feed(sampled(qwen3, f"\n{call}"))
    assert parser.finish().tool_calls == (ToolCall("call_0", "f", "{}"),)
    assert parser.message == Message(
        Role.ASSISTANT, "I will look", "let me see", (ToolCall("call_0", "f", "{}"),)
    )


def test_text_flows_in_families_that_do_not_think(llama: AdaptedRenderer, deepseek: AdaptedRenderer) -> None:
    for family in (llama, deepseek):
        parser = family.parser()
        assert parser.feed(sampled(family, "Hello there")).content == "Hello there"


def test_a_bare_call_of_llama_is_never_shown_as_text(llama: AdaptedRenderer) -> None:
    parser = llama.parser()
    assert not parser.feed(sampled(llama, '{"name": "bash", "parameters": {"command": "ls"}}<|eot_id|>'))
    parser.finish()
    assert parser.message == Message(
        Role.ASSISTANT, tool_calls=(ToolCall("call_0", "bash", '{"command": "ls"}'),)
    )


def test_calls_of_deepseek_are_read(deepseek: AdaptedRenderer) -> None:
    parser = deepseek.parser()
    call = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    calls = call.format("a", '{"x": 1}') + call.format("b", '{"y": "é"}')
    text = f"On it.<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    parser.feed(sampled(deepseek, text))
    parser.finish()
    assert parser.message.content == "On it."
    assert [(call.name, call.arguments) for call in parser.message.tool_calls] == [
        ("a", '{"x": 1}'),
        ("b", '{"y": "é"}'),
    ]


def test_no_half_character_is_ever_shown(family: AdaptedRenderer) -> None:
    parser = family.parser()
    shown = [parser.feed([id]).content for id in sampled(family, "ok 👩🏽‍🚀 漢字 é")]
    assert "".join(shown) == "ok 👩🏽‍🚀 漢字 é"
    assert all("\ufffd" not in text for text in shown)
