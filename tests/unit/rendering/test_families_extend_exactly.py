"""Real families: the next prompt begins with exactly what the policy saw and sampled, or is rendered anew."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.adapter import AdaptedRenderer
from polar.rendering.base import Unrenderable

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = TEXTS.map(lambda text: f"a{text}z")
"""Begin and end with no white space, which templates trim."""
VALUES = st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans())
CALLS = st.builds(
    lambda name, given: ToolCall("c", name, json.dumps(given, ensure_ascii=False)),
    st.sampled_from(["bash", "read"]),
    st.dictionaries(TEXTS, VALUES, max_size=3),
)
HEARD = st.lists(
    st.builds(Message, st.sampled_from([Role.USER, Role.TOOL, Role.SYSTEM]), WORDS), min_size=1, max_size=3
)
RESULTS = st.lists(st.builds(Message, st.just(Role.TOOL), WORDS), min_size=1, max_size=3)
TOOLS = [ToolDefinition("bash", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}})]
ASKED = [Message(Role.SYSTEM, "Be good."), Message(Role.USER, "Hi")]


def sampled_as(family: AdaptedRenderer, asked: Sequence[Message], answer: Message) -> list[int]:
    """An answer as the policy writes it: what the template shows of the last turn, up to its end token."""
    prompt, end = family.render(asked, TOOLS), [Message(Role.TOOL, "a")]
    whole = family.render([*asked, answer, *end], TOOLS)
    assert whole[: len(prompt)] == prompt
    stops = [place for place, id in enumerate(whole) if id in family.stop_token_ids and place >= len(prompt)]
    return whole[len(prompt) : stops[0] + 1]


@settings(max_examples=40)
@given(WORDS, st.lists(CALLS, max_size=2), WORDS, RESULTS)
def test_qwen3_keeps_its_thoughts_within_a_cycle_of_tools(
    qwen3: AdaptedRenderer, text: str, calls: list[ToolCall], thought: str, new: list[Message]
) -> None:
    answer = Message(Role.ASSISTANT, text, thought, tuple(calls))
    prompt, sampled = qwen3.render(ASKED, TOOLS), sampled_as(qwen3, ASKED, answer)
    bridge = qwen3.bridge(prompt, sampled, new)
    assert bridge is not None
    assert prompt + sampled + bridge == qwen3.render([*ASKED, answer, *new], TOOLS)


def test_qwen3_forks_where_its_template_drops_thoughts(qwen3: AdaptedRenderer) -> None:
    answer = Message(Role.ASSISTANT, "yes", "hm")
    prompt, sampled = qwen3.render(ASKED, TOOLS), sampled_as(qwen3, ASKED, answer)
    next_query = [Message(Role.USER, "and now?")]
    assert qwen3.bridge(prompt, sampled, next_query) is None
    anew = qwen3.render([*ASKED, answer, *next_query], TOOLS)
    assert anew[: len(prompt + sampled)] != prompt + sampled


@settings(max_examples=30)
@given(WORDS, st.lists(CALLS, max_size=2), WORDS, HEARD, WORDS)
def test_qwen3_that_keeps_its_thoughts_extends_at_every_message(
    qwen3_with_thoughts: AdaptedRenderer,
    text: str,
    calls: list[ToolCall],
    thought: str,
    new: list[Message],
    question: str,
) -> None:
    """The new messages stand after the sampled tokens as the template shows them."""
    family = qwen3_with_thoughts
    answer = Message(Role.ASSISTANT, text, thought, tuple(calls))
    prompt, sampled = family.render(ASKED, TOOLS), sampled_as(family, ASKED, answer)
    heard = [*new, Message(Role.USER, question)]
    bridge = family.bridge(prompt, sampled, heard)
    assert bridge is not None
    shown = family.render([*ASKED, answer, *heard], TOOLS)
    assert shown[-len(bridge) - 1 :] == [sampled[-1], *bridge]


def test_both_ways_of_qwen3_begin_alike_and_differ_at_a_new_question(
    qwen3: AdaptedRenderer, qwen3_with_thoughts: AdaptedRenderer
) -> None:
    prompt = qwen3.render(ASKED, TOOLS)
    assert prompt == qwen3_with_thoughts.render(ASKED, TOOLS)
    sampled = sampled_as(qwen3, ASKED, Message(Role.ASSISTANT, "yes", "hm"))
    question, result = [Message(Role.USER, "and now?")], [Message(Role.TOOL, "a")]
    assert qwen3.bridge(prompt, sampled, question) is None
    assert qwen3_with_thoughts.bridge(prompt, sampled, question) is not None
    assert qwen3.bridge(prompt, sampled, result) == qwen3_with_thoughts.bridge(prompt, sampled, result)


@settings(max_examples=40)
@given(WORDS, st.one_of(st.none(), CALLS), HEARD)
def test_llama_extends_to_what_a_full_render_gives(
    llama: AdaptedRenderer, text: str, call: ToolCall | None, new: list[Message]
) -> None:
    answer = Message(Role.ASSISTANT, text) if call is None else Message(Role.ASSISTANT, tool_calls=(call,))
    prompt, sampled = llama.render(ASKED, TOOLS), sampled_as(llama, ASKED, answer)
    bridge = llama.bridge(prompt, sampled, new)
    assert bridge is not None
    assert prompt + sampled + bridge == llama.render([*ASKED, answer, *new], TOOLS)


@settings(max_examples=40)
@given(WORDS, st.lists(CALLS, max_size=2), HEARD)
def test_deepseek_extends_to_what_a_full_render_gives(
    deepseek: AdaptedRenderer, text: str, calls: list[ToolCall], new: list[Message]
) -> None:
    answer = Message(Role.ASSISTANT, text, tool_calls=tuple(calls))
    prompt, sampled = deepseek.render(ASKED, TOOLS), sampled_as(deepseek, ASKED, answer)
    bridge = deepseek.bridge(prompt, sampled, new)
    assert bridge is not None
    assert prompt + sampled + bridge == deepseek.render([*ASKED, answer, *new], TOOLS)


@settings(max_examples=40)
@given(WORDS, HEARD)
def test_a_turn_cut_short_is_closed_and_kept(family: AdaptedRenderer, text: str, new: list[Message]) -> None:
    """By a length limit or a stop string: the end-of-turn token was never sampled."""
    prompt = family.render(ASKED, TOOLS)
    sampled = sampled_as(family, ASKED, Message(Role.ASSISTANT, text, "hm"))[:-1]
    bridge = family.bridge(prompt, sampled, new)
    if bridge is None:
        return
    assert bridge[0] in family.stop_token_ids
    whole = family.bridge(prompt, [*sampled, bridge[0]], new)
    assert whole is not None
    assert bridge[1:] == whole


def test_thoughts_cut_short_are_closed_too(qwen3: AdaptedRenderer) -> None:
    sampled = qwen3.raw.ids("<think>\nI wonder")
    bridge = qwen3.bridge(qwen3.render(ASKED, TOOLS), sampled, [Message(Role.TOOL, "a")])
    assert bridge is not None
    spelt = b"".join(map(qwen3.spelling, bridge)).decode()
    assert spelt.startswith("</think><|im_end|>\n<|im_start|>user\n<tool_response>")


@settings(max_examples=60)
@given(st.lists(st.integers(0, 120_000), min_size=1, max_size=30), st.booleans(), HEARD, st.integers(0, 3000))
def test_what_was_sampled_is_never_rewritten_and_the_far_past_never_read(
    family: AdaptedRenderer, sampled: list[int], ends: bool, new: list[Message], past: int
) -> None:
    """Whatever ids a policy samples: as lists or arrays, after a short past or a long one."""
    stop = family.stop_token_ids[0]
    prompt = family.render(ASKED, TOOLS)
    long = [*prompt[:-3], *([11, 12, 13, stop] * past), *prompt[-40:]]
    sampled = [*(id for id in sampled if id not in family.stop_token_ids), *([stop] if ends else [])]
    bridge = family.bridge(prompt, sampled, new)
    as_array = family.bridge(np.array(long, np.int32), np.array(sampled, np.int32), new)
    assert as_array == bridge
    if bridge is not None:
        generation = family.render(new, ())[-2:]
        assert bridge[-2:] == generation


def test_control_tokens_in_messages_stay_plain_text(family: AdaptedRenderer) -> None:
    stop = family.stop_token_ids[0]
    spelt = family.spelling(stop).decode()
    plain, forged = ([Message(Role.USER, text)] for text in ("x", spelt))
    assert family.render(forged, ()).count(stop) == family.render(plain, ()).count(stop)
    ended = [5, stop]
    before, after = (
        family.bridge(family.render(ASKED, ()), ended, [Message(Role.TOOL, t)]) for t in ("x", spelt)
    )
    assert before is not None
    assert after is not None
    assert before.count(stop) == after.count(stop)


def test_what_a_template_cannot_show_is_refused_by_name(llama: AdaptedRenderer) -> None:
    two = Message(Role.ASSISTANT, tool_calls=(ToolCall("a", "bash", "{}"), ToolCall("b", "bash", "{}")))
    with pytest.raises(Unrenderable, match="template cannot show"):
        llama.render([*ASKED, two, Message(Role.TOOL, "x")], TOOLS)


@given(st.text("az é🙂\n{<|", max_size=20))
def test_tokens_are_spelt_as_the_text_they_stand_for(qwen3: AdaptedRenderer, text: str) -> None:
    ids = qwen3.render([Message(Role.USER, f"a{text}z")], ())
    spelt = b"".join(map(qwen3.spelling, ids)).decode()
    assert spelt == f"<|im_start|>user\na{text}z<|im_end|>\n<|im_start|>assistant\n"


@given(st.text("az é🙂\n{<|", max_size=20))
def test_an_answer_is_begun_right_after_the_prompt(qwen3: AdaptedRenderer, text: str) -> None:
    opened = qwen3.opened(text)
    assert opened is not None
    assert b"".join(map(qwen3.spelling, opened)).decode() == text
    assert not set(opened) & set(qwen3.stop_token_ids)
