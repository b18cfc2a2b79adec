"""A system prompt and tools that come again are not tokenised again, and the ids are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.models.chat import Message, Role, ToolDefinition
from polar.rendering.adapter import adapted_renderer
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from polar.rendering.tokenizer import KeptTexts, read_tokenizer
from tests.fakes.counting_tokenizer import CountingTokenizer
from tests.tokenizers_of_families import FAMILIES, Family

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cn", "Co"]), max_size=12)


def test_a_long_text_is_tokenised_twice_and_never_again() -> None:
    encode: Any = CountingTokenizer()
    texts = KeptTexts(encode)
    assert {tuple(texts.ids("x" * 600)) for _ in range(10)} == {(120,) * 600}
    assert len(encode.asked) == 2


def test_what_a_template_writes_between_messages_is_tokenised_once() -> None:
    encode: Any = CountingTokenizer()
    texts = KeptTexts(encode)
    assert {tuple(texts.ids("user\n")) for _ in range(10)} == {(117, 115, 101, 114, 10)}
    assert len(encode.asked) == 1


@pytest.mark.parametrize("length", [5, 600])
def test_callers_may_change_what_they_get(length: int) -> None:
    texts = KeptTexts(cast(Any, CountingTokenizer()))
    for _ in range(4):
        got = texts.ids("x" * length)
        assert got == [120] * length
        got.clear()


def test_what_comes_once_pushes_nothing_out() -> None:
    encode: Any = CountingTokenizer()
    texts = KeptTexts(encode, room=2_000)
    for _ in range(2):
        texts.ids("x" * 600)
    for number in range(100):
        texts.ids(f"{number:<600}")
    encode.asked.clear()
    texts.ids("x" * 600)
    assert encode.asked == []


def test_room_is_bounded_and_the_longest_unused_goes_first() -> None:
    encode: Any = CountingTokenizer()
    texts = KeptTexts(encode, room=1_500)
    for letter in "aabbaacc":  # c pushes b out: a was used after it
        texts.ids(letter * 600)
    encode.asked.clear()
    for letter in "acb":
        texts.ids(letter * 600)
    assert [text[0] for text in encode.asked] == ["b"]


@given(st.lists(st.sampled_from(["", "a", "b", "x" * 600, "y" * 700]), max_size=12))
def test_texts_that_are_asked_for_together_get_their_own_ids(asked: list[str]) -> None:
    encode: Any = CountingTokenizer()
    texts = KeptTexts(encode)
    for _ in range(3):
        assert texts.of_all(asked) == [[ord(character) for character in text] for text in asked]


@pytest.fixture(scope="module", params=FAMILIES, ids=[family.name for family in FAMILIES])
def fresh(request: pytest.FixtureRequest) -> Callable[[], Renderer]:
    """Makes renderers of the package that have seen nothing yet."""
    family: Family = request.param
    tokenizer = read_tokenizer(family.directory() / "tokenizer.json")
    return lambda: adapted_renderer(family.name, tokenizer, keeps_thoughts=False)


@dataclass
class Long:
    """A conversation whose beginning is worth keeping."""

    messages: list[Message]
    tools: list[ToolDefinition]


LONG = st.builds(
    lambda system, tool, asked: Long(
        [Message(Role.SYSTEM, f"{system} Be good." * 60), Message(Role.USER, asked)],
        [ToolDefinition("bash", f"Runs. {tool}" * 50, {"type": "object"})],
    ),
    *(TEXTS, TEXTS, TEXTS),
)


@settings(max_examples=30)
@given(LONG)
def test_kept_renders_equal_fresh_ones(fresh: Callable[[], Renderer], long: Long) -> None:
    keeping = fresh()
    kept = [keeping.render(long.messages, long.tools) for _ in range(3)]
    assert kept == [fresh().render(long.messages, long.tools)] * 3


@settings(max_examples=10)
@given(LONG)
def test_kept_renders_of_a_template_equal_fresh_ones(model_directory: Path, long: Long) -> None:
    keeping, fresh = (renderer_for("x", model_directory, tool_prompt=True) for _ in range(2))
    assert keeping is not None
    assert fresh is not None
    kept = [keeping.render(long.messages, long.tools) for _ in range(3)]
    assert kept == [fresh.render(long.messages, long.tools)] * 3
