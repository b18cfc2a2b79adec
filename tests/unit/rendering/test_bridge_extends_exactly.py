"""A next prompt is what the policy saw and sampled, plus the new messages, and nothing rewritten."""

from __future__ import annotations

import json

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.template_renderer import TemplateRenderer
from polar.rendering.tool_calls import assistant_text
from tests.turns import read_turn

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ARGUMENTS = st.dictionaries(
    TEXTS, st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans()), max_size=3
).map(lambda value: json.dumps(value, ensure_ascii=False))
CALLS = st.builds(ToolCall, st.just("call_0"), st.sampled_from(["bash", "read"]), ARGUMENTS)
ANSWERS = st.one_of(
    TEXTS.map(lambda text: Message(Role.ASSISTANT, text.lstrip())),
    st.builds(
        lambda text, calls: Message(Role.ASSISTANT, text.strip(), tool_calls=tuple(calls)),
        TEXTS,
        st.lists(CALLS, min_size=1, max_size=2),
    ),
)
NEW = st.lists(
    st.builds(Message, st.sampled_from([Role.USER, Role.TOOL, Role.SYSTEM]), TEXTS), min_size=1, max_size=3
)
TOOLS = [ToolDefinition("bash", "Run.", {}), ToolDefinition("read", "Read.", {})]


@settings(max_examples=150)
@given(TEXTS, ANSWERS, NEW)
def test_a_cleanly_sampled_turn_bridges_to_what_a_full_render_gives(
    smollm2: TemplateRenderer, tokenizer: Tokenizer, asked: str, answer: Message, new: list[Message]
) -> None:
    history = [Message(Role.USER, asked)]
    prompt = smollm2.render(history, TOOLS)
    encoded = [*plain_ids(tokenizer, assistant_text(answer)), smollm2.stop_token_ids[0]]
    bridge = smollm2.bridge(prompt, encoded, new, history=[*history, answer], tools=TOOLS)
    assert bridge is not None
    assert prompt + encoded + bridge == smollm2.render([*history, answer, *new], TOOLS)


@settings(max_examples=100)
@given(ANSWERS)
def test_a_canonical_turn_parses_back_to_its_message(
    smollm2: TemplateRenderer, tokenizer: Tokenizer, answer: Message
) -> None:
    ids = plain_ids(tokenizer, assistant_text(answer))
    assume("<tool_call>" not in answer.content)
    assume(tokenizer.decode(ids) == assistant_text(answer))  # the vocabulary lacks a few rare bytes
    message = read_turn(smollm2.parser(), ids)
    assert message.content == answer.content
    read = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    assert read == [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    assert assistant_text(message) == assistant_text(answer)


def test_a_turn_cut_short_is_closed_before_the_next(smollm2: TemplateRenderer, tokenizer: Tokenizer) -> None:
    history, new = [Message(Role.USER, "Count.")], [Message(Role.USER, "Go on.")]
    prompt, sampled = smollm2.render(history, ()), plain_ids(tokenizer, "1, 2, 3")
    turn = Message(Role.ASSISTANT, "1, 2, 3")
    bridge = smollm2.bridge(prompt, sampled, new, history=[*history, turn])
    assert bridge is not None
    assert prompt + sampled + bridge == smollm2.render([*history, turn, *new], ())


def test_the_next_turn_may_follow_without_new_messages(smollm2: TemplateRenderer) -> None:
    ended = [5, smollm2.stop_token_ids[0]]
    history = [Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yes")]
    after_the_end, after_a_cut = (smollm2.bridge([1], ids, [], history=history) for ids in (ended, [5]))
    assert after_the_end is not None
    assert after_a_cut is not None
    assert [*ended, *after_the_end] == [5, *after_a_cut]


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """As a policy samples text: control tokens written out in letters."""
    tokenizer.encode_special_tokens = True
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    finally:
        tokenizer.encode_special_tokens = False
