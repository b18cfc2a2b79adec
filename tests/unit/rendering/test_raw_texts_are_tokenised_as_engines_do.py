"""A text without a template has the ids that the tokenizer itself gives it, whatever renderer is around."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from polar.rendering.base import RawParser
from polar.rendering.families import renderer_for
from polar.rendering.tokenizer import RawText, read_tokenizer
from tests.tokenizers_of_families import LLAMA, MISTRAL, QWEN3, Family
from tests.turns import read_turn

CONTROL = {
    "qwen3": ["<|im_start|>", "<|im_end|>", "<think>"],
    "llama-3": ["<|eot_id|>", "<|start_header_id|>"],
    "mistral": ["[INST]", "</s>"],
}
BEGINNING = {"llama-3": "<|begin_of_text|>", "mistral": "<s>"}


@pytest.fixture(scope="module", params=[QWEN3, LLAMA, MISTRAL], ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def both(family: Family) -> tuple[RawText, Tokenizer]:
    """The one under test, beside a tokenizer that nobody has told to hide control tokens."""
    file = family.directory() / "tokenizer.json"
    hiding = read_tokenizer(file)
    hiding.encode_special_tokens = True
    return RawText(hiding), read_tokenizer(file)


@given(data=st.data())
def test_ids_are_the_tokenizer_s_own(
    both: tuple[RawText, Tokenizer], family: Family, data: st.DataObject
) -> None:
    raw, own = both
    pieces = st.sampled_from(["Hi", " there", "\n", "🙂", "  ", "user\n", *CONTROL[family.name]])
    text = "".join(data.draw(st.lists(pieces, min_size=1, max_size=12)))
    assert raw.ids(text) == own.encode(text).ids


def test_a_beginning_that_is_written_is_not_put_there_again(
    both: tuple[RawText, Tokenizer], family: Family
) -> None:
    raw, _ = both
    written = BEGINNING.get(family.name, "") + "Hi"
    assert raw.ids(written) == raw.ids("Hi")
    assert raw.has(0)
    assert not raw.has(2**31 - 1)


def test_sampled_ids_read_as_text_however_they_are_split(family: Family) -> None:
    renderer = renderer_for(family.name, family.directory(), tool_prompt=False)
    assert renderer is not None
    said = 'Wörld 🙂 <tool_call>\n{"name": "f"}\n</tool_call>'
    ids = [*renderer.raw.ids(said)[len(renderer.raw.ids("a")) - 1 :], renderer.stop_token_ids[0]]
    for size in (1, 2, len(ids)):
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        assert read_turn(RawParser(renderer), *pieces).content == said
