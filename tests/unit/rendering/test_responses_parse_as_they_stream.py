"""Sampled ids become the same message however they are split; nothing sampled is lost."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from polar.models.chat import Message
from polar.rendering.template_renderer import TemplateRenderer
from polar.rendering.tool_calls import CallReader
from tests.turns import message_of, read_turn

LS = '{"name": "bash", "arguments": {"command": "ls"}}'


def read(text: str, *, pieces: list[int] | None = None) -> tuple[str, list[tuple[str, str]]]:
    reader, content, calls = CallReader(), "", []
    cuts = sorted({0, len(text), *(cut % (len(text) + 1) for cut in pieces or [])})
    deltas = [reader.feed(text[start:end]) for start, end in pairwise(cuts)]
    for delta in [*deltas, reader.finish()]:
        content += delta.content
        calls += [(call.name, call.arguments) for call in delta.tool_calls]
    return content, calls


def parse(smollm2: TemplateRenderer, ids: list[int], sizes: list[int]) -> Message:
    ends = [*accumulate(sizes), len(ids)]
    pieces = (ids[start:end] for start, end in zip([0, *ends], ends, strict=False))
    return read_turn(smollm2.parser(), *pieces)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello", "Hello", []),
        (f"<tool_call>\n{LS}\n</tool_call>", "", [("bash", '{"command": "ls"}')]),
        (f"Sure.\n<tool_call>\n{LS}\n</tool_call>", "Sure.", [("bash", '{"command": "ls"}')]),
        (f"<tool_call>\n{LS}", "", [("bash", '{"command": "ls"}')]),
        (f"<tool_call>\n{LS}\n</tool_c", "", [("bash", '{"command": "ls"}')]),
        (f"<tool_call>[{LS}, {LS}]</tool_call>", "", [("bash", '{"command": "ls"}')] * 2),
        (f"<tool_call>{LS}</tool_call>\n<tool_call>{LS}</tool_call>\n", "",
         [("bash", '{"command": "ls"}')] * 2),
        (f"<tool_call>{LS}}}\n</tool_call>", "", [("bash", '{"command": "ls"}')]),
        (f"<tool_call>{LS}</tool_call> Done.", "Done.", [("bash", '{"command": "ls"}')]),
        (f"A<tool_call>{LS}</tool_call>\nB", "A\nB", [("bash", '{"command": "ls"}')]),
        ('<tool_call>{"name": "x"}</tool_call>', "", [("x", "{}")]),
        ('<tool_call>{"name":"x","parameters":{"a":1}}</tool_call>', "", [("x", '{"a":1}')]),
        ('<tool_call>{"name":"x","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("x", '{"a": 1}')]),
        ('<tool_call>{"name":"w","arguments":{"t":"a\nb"}}</tool_call>', "", [("w", '{"t": "a\\nb"}')]),
        ('<tool_call>{"name":"w","arguments":{"t":"</tool_call>"}}</tool_call>', "",
         [("w", '{"t":"</tool_call>"}')]),
    ],
)  # fmt: skip
def test_calls_are_read_tolerantly(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nls -la\n</tool_call>",
        "<tool_call>\n{'name': 'bash'}\n</tool_call>",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>",
        "a < b <tool_cal",
        "text \n\n",
    ],
)
def test_what_is_no_call_stays_content_to_the_last_character(text: str) -> None:
    assert read(text) == (text, [])


def test_a_call_after_an_unclosed_string_is_still_found() -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}}\n</tool_call>'
    assert read(f"{broken}\n<tool_call>{LS}</tool_call>") == (broken, [("bash", '{"command": "ls"}')])


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        LS,
        "\n",
        " ",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "<",
        "text",
        "🙂",
        "<tool_",
        ",",
    ]
)


@settings(max_examples=300)
@given(st.lists(PIECES, max_size=12).map("".join), st.lists(st.integers(0, 500), max_size=8))
def test_the_same_text_gives_the_same_message_however_split(text: str, cuts: list[int]) -> None:
    assert read(text, pieces=cuts) == read(text)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 49151), max_size=30), st.lists(st.integers(1, 5), max_size=10))
def test_any_ids_give_the_same_message_however_split(
    smollm2: TemplateRenderer, ids: list[int], sizes: list[int]
) -> None:
    whole = parse(smollm2, ids, [])
    assert parse(smollm2, ids, sizes) == whole
    assert parse(smollm2, ids, [1] * len(ids)) == whole
    whole.content.encode()


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<�"), max_size=30))
def test_no_half_character_is_emitted(smollm2: TemplateRenderer, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assume(tokenizer.decode(ids) == text)  # the vocabulary lacks a few rare bytes
    parser = smollm2.parser()
    deltas = [parser.feed([id]) for id in ids]
    assert not any("�" in delta.content for delta in deltas)
    assert message_of([*deltas, parser.finish()]).content == text


def test_text_flows_before_the_turn_ends_and_a_call_when_its_json_is_complete() -> None:
    reader = CallReader()
    assert reader.feed("Let me look.").content == "Let me look."
    assert not reader.feed("\n<tool")
    assert not reader.feed('_call>\n{"name": "bash", "arguments": {"command": "ls"}')
    delta = reader.feed("}")
    assert json.loads(delta.tool_calls[0].arguments) == {"command": "ls"}
    assert not reader.feed("\n</tool_call>")


def test_ids_after_the_end_of_turn_are_ignored(smollm2: TemplateRenderer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hi<|im_end|>more", add_special_tokens=False).ids
    assert parse(smollm2, ids, []).content == "Hi"
    assert parse(smollm2, ids, [1] * len(ids)).content == "Hi"


def test_a_call_whose_name_is_half_a_surrogate_pair_stays_text(smollm2: TemplateRenderer) -> None:
    text = '<tool_call>\n{"name": "\\ud83d", "arguments": {}}\n</tool_call>'
    message = read_turn(smollm2.parser(), smollm2.tokens.ids(text))
    assert not message.tool_calls
    assert "ud83d" in message.content
