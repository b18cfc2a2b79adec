"""A request is matched to the turn it extends, however its harness reshaped the history."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.gateway.canonical import key_of
from polar.gateway.conversation import Conversations
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.recordings.growth import GrowingTree, Turn

TOOLS = (ToolDefinition("bash", "Run.", {"type": "object"}),)
OTHER_TOOLS = (*TOOLS, ToolDefinition("read", "Read.", {"type": "object"}))
CALL = ToolCall("call_1", "bash", '{"b": 1.0, "a": [true, null, 1e3], "c": "é"}')


def user(text: str) -> Message:
    return Message(Role.USER, text)


def said(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(Role.ASSISTANT, text, reasoning, tuple(calls))


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


class Story:
    """A session whose turns have tokens that tell which is which."""

    def __init__(self, tools: tuple[ToolDefinition, ...] = TOOLS) -> None:
        self.conversations = Conversations()
        self.tree = GrowingTree()
        self.tools = tools
        self.count = 0

    def answer(self, messages: Sequence[Message], message: Message) -> Turn:
        """A request as the gateway takes it, and what was sampled for it."""
        self.count += 1
        extension = self.conversations.find(messages, self.tools)
        before = extension.turn.messages if extension.turn else ()
        whole = (*before, *extension.new_messages, message)
        turn = self.turn(f"c{self.count}", extension.turn, whole, self.count * 10)
        self.conversations.add(turn, self.tools)
        return turn

    def turn(self, name: str, before: Turn | None, messages: tuple[Message, ...], token: int) -> Turn:
        """A completion whose prompt extends another's by one token, and that sampled the next."""
        prompt = np.concatenate([before.ids(), ids(token)]) if before else ids(token)
        hints = [before.completion_id if before else None]
        return self.tree.add(self.tree.prove(name, prompt, ids(token + 1), messages, hints=hints))

    def found(self, *messages: Message) -> Turn | None:
        return self.conversations.find(messages, self.tools).turn


@pytest.mark.parametrize(
    "echo",
    [
        said("I look.", CALL),
        said("I look.", replace(CALL, id="toolu_9")),
        said("\ufeff I look.\n", CALL),
        said("I look.", replace(CALL, arguments='{"a":[true,null,1000],"b":1,"c":"\\u00e9"}')),
        said("I look.", CALL, reasoning="signed"),
    ],
)
def test_what_was_sampled_is_known_again(echo: Message) -> None:
    story = Story()
    turn = story.answer([user("hi")], said("I look.", CALL, reasoning="hm"))
    extension = story.conversations.find([user("hi"), echo, user("ok")], TOOLS)
    assert extension.turn is turn
    assert extension.follows is turn
    assert extension.new_messages == (user("ok"),)


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ('{"n": 12345678901234567890}', '{"n":12345678901234567000}'),
        ('{"n": -0.0}', '{"n":0}'),
        ('{"n": 1e400}', '{"n":null}'),
        ('{"10": 1, "9": 2}', '{"9":2,"10":1}'),
        ('{"s": "\\ud800"}', '{"s": "?"}'),
        ("", "{}"),
        ("{oops", "{oops"),
    ],
)
def test_arguments_survive_javascript(sampled: str, echoed: str) -> None:
    assert key_of(said("", ToolCall("a", "f", sampled))) == key_of(said("", ToolCall("b", "f", echoed)))


@pytest.mark.parametrize(
    ("one", "other"),
    [('{"n": true}', '{"n": 1}'), ('{"n": "1"}', '{"n": 1}'), ('{"a": [1, 2]}', '{"a": [2, 1]}')],
)
def test_different_arguments_stay_different(one: str, other: str) -> None:
    assert key_of(said("", ToolCall("a", "f", one))) != key_of(said("", ToolCall("a", "f", other)))


def test_text_and_call_replayed_as_two_messages_are_the_one_turn() -> None:
    story = Story()
    only_text = story.answer([user("hi")], said("I look."))
    turn = story.answer([user("hi")], said("I look.", CALL, replace(CALL, id="call_2")))
    split = [user("hi"), said("I look."), said("", CALL), said("", CALL), user("ok")]
    extension = story.conversations.find(split, TOOLS)
    assert extension.turn is turn
    assert extension.new_messages == (user("ok"),)
    assert story.found(user("hi"), said("I look."), user("ok")) is only_text


def test_two_sampled_turns_replayed_as_one_message_are_the_second() -> None:
    story = Story()
    first = story.answer([user("hi")], said("One, "))
    second = story.answer([user("hi"), said("One, ")], said("two."))
    assert story.found(user("hi"), said("One, two."), user("ok")) is second
    assert story.found(user("hi"), said("One, "), said("two."), user("ok")) is second
    assert story.found(user("hi"), said("One, "), user("ok")) is first


def test_a_turn_may_have_fewer_messages_than_the_one_it_extends() -> None:
    """Where an engine renders, a conversation stands as its harness sent it: here many messages as one."""
    story = Story()
    pieces = [said(letter) for letter in "abcd"]
    first = story.answer([user("hi"), *pieces], said("e"))
    second = story.turn("c9", first, (user("hi"), said("abcde"), said("f")), 1)
    story.conversations.add(second, TOOLS)
    assert story.found(user("hi"), said("abcde"), said("f"), user("ok")) is second
    assert story.found(user("hi"), said("abcdef"), user("ok")) is second


def test_a_rewritten_history_forks_at_that_message_and_says_what_it_follows() -> None:
    story = Story()
    first = story.answer([user("hi")], said("a"))
    second = story.answer([user("hi"), said("a"), user("b")], said("c"))
    rewritten = [user("hi"), said("a"), user("B!"), said("c"), user("d")]
    extension = story.conversations.find(rewritten, TOOLS)
    assert extension.turn is extension.follows is first
    assert extension.new_messages == tuple(rewritten[2:])
    assert story.found(user("hi"), said("a"), user("b"), said("c")) is second


def test_other_tools_begin_anew_and_say_what_they_follow() -> None:
    story = Story()
    turn = story.answer([user("hi")], said("a"))
    extension = story.conversations.find([user("hi"), said("a"), user("b")], OTHER_TOOLS)
    assert extension.turn is None
    assert extension.follows is turn


def test_tools_whose_values_are_written_otherwise_are_others() -> None:
    """Python takes 1, 1.0 and true for the same; a template writes each as it came."""
    story = Story()
    values = (1, True, 1.0)
    offered = [(replace(TOOLS[0], parameters={"minimum": value}),) for value in values]
    for value, tools in zip(values, offered, strict=True):
        kept = story.conversations.known(tools)
        assert repr(kept[0].parameters) == repr({"minimum": value})
        assert story.conversations.find([user("hi"), said("a"), user("b")], kept).turn is None
        story.tools = kept
        turn = story.answer([user("hi")], said("a"))
        assert story.found(user("hi"), said("a"), user("b")) is turn


def test_tools_that_come_again_are_kept_once() -> None:
    story = Story()
    first = story.conversations.known((replace(TOOLS[0], parameters={"type": "object", "a": 1}),))
    again = (replace(TOOLS[0], parameters={"a": 1, "type": "object"}),)
    assert story.conversations.known(again) is first


def test_a_summary_of_the_past_follows_nothing_that_was_sampled() -> None:
    story = Story()
    story.answer([Message(Role.SYSTEM, "s"), user("hi")], said("a"))
    extension = story.conversations.find([Message(Role.SYSTEM, "s"), user("Summary: …")], TOOLS)
    assert extension.turn is None
    assert extension.follows is None


def test_the_latest_of_equal_answers_is_continued() -> None:
    story = Story()
    story.answer([user("hi")], said("a"))
    again = story.answer([user("hi")], said("a"))
    assert story.found(user("hi"), said("a"), user("b")) is again


def test_a_fork_keeps_both_sides_tokens() -> None:
    story = Story()
    first = story.answer([user("hi")], said("a"))
    left = story.answer([user("hi"), said("a"), user("l")], said("b"))
    right = story.answer([user("hi"), said("a"), user("r")], said("b"))
    further = story.answer([user("hi"), said("a"), user("l"), said("b"), user("m")], said("c"))
    assert first.ids().tolist() == [10, 11]
    assert left.ids().tolist() == [10, 11, 20, 21]
    assert right.ids().tolist() == [10, 11, 30, 31]
    assert further.prompt_ids().tolist() == [10, 11, 20, 21, 40]
    assert further.link.given == 1
    assert further.sampled_ids.tolist() == [41]


def test_tokens_are_kept_once_and_cannot_be_written() -> None:
    story = Story()
    turns = [story.answer([user("hi")], said("a"))]
    for number in range(300):
        turns.append(story.answer([*turns[-1].messages, user(str(number))], said(str(number))))
    assert turns[-1].prompt_ids().base is turns[-2].prompt_ids().base
    for number, turn in enumerate(turns[1:], 2):
        assert turn.parent is not None
        assert turn.prompt_ids().tolist() == [*turn.parent.ids().tolist(), number * 10]
    with pytest.raises(ValueError, match="read-only"):
        turns[0].prompt_ids()[0] = 1


class Sent(str):
    """A text whose end can be seen."""

    __slots__ = ("__weakref__",)


def test_what_a_client_sends_again_is_not_kept() -> None:
    story = Story()
    turn = story.answer([user("hi")], said("I look.", CALL))
    turn = story.answer([*turn.messages, user("go on")], said("Done."))
    for _ in range(2):
        call = replace(CALL, arguments=Sent(CALL.arguments))
        sent = [replace(message, content=Sent(message.content)) for message in turn.messages]
        sent[1] = replace(sent[1], tool_calls=(call,))
        texts = [weakref.ref(text) for text in (call.arguments, *(message.content for message in sent))]
        assert story.found(*sent, user("so?")) is turn
        del call, sent
        gc.collect()
        assert [text() for text in texts] == [None] * len(texts)


def test_what_others_said_is_kept_once_where_a_client_sends_answers_in_parts() -> None:
    """Here every text apart from its call, so that its history has more messages than the recorded one."""
    story = Story()
    turn = story.answer([user("hi")], said("I look.", CALL))
    sent: list[Message] = [user("hi")]
    heard: list[weakref.ref[Sent]] = []
    for number in range(6):
        result = Sent(f"result {number}")
        heard.append(weakref.ref(result))
        sent += [said("I look."), said("", CALL), Message(Role.TOOL, result)]
        del result
        recorded = [Message(Role.TOOL, f"result {number}")]
        assert story.found(*sent) is turn
        turn = story.answer([*turn.messages, *recorded], said("I look.", CALL))
    sent += [said("I look."), said("", CALL)]
    assert story.found(*sent, user("so?")) is turn
    del sent
    gc.collect()
    assert [text() for text in heard] == [None] * len(heard)


def test_a_history_that_was_sent_before_goes_on_where_its_answer_does() -> None:
    """The turn it led to may be the beginning of a longer answer that comes back in two messages."""
    story = Story()
    part = story.answer([user("hi")], said("a"))
    whole = story.answer([user("hi")], said("ab", CALL))
    assert story.found(user("hi"), said("a"), user("go on")) is part
    assert story.found(user("hi"), said("a"), said("b", CALL), user("go on")) is whole


HEARD = st.sampled_from([user("u"), user("v"), Message(Role.TOOL, "t"), Message(Role.SYSTEM, "s")])
ANSWERS = st.sampled_from([said("a"), said("b", CALL), said("", CALL), said("ab", CALL, CALL), said("ab")])
HISTORIES = st.lists(st.tuples(HEARD, ANSWERS), max_size=3).map(
    lambda pairs: [m for pair in pairs for m in pair]
)


@given(st.lists(st.tuples(HISTORIES, HEARD, ANSWERS), max_size=12), st.data())
def test_every_request_extends_the_deepest_turn_it_holds(
    asked: list[tuple[list[Message], Message, Message]], data: st.DataObject
) -> None:
    """Against the plain rule, which compares the history with every turn; whole or in pieces."""
    story = Story()
    turns: list[Turn] = []
    for history, heard, answer in asked:
        messages = [*history, heard]
        keys = list(map(key_of, messages))
        held = [turn for turn in turns if keys[: len(turn.messages)] == list(map(key_of, turn.messages))]
        deepest = max(held, key=lambda turn: (len(turn.messages), turns.index(turn)), default=None)
        assert story.found(*messages) is deepest
        past = len(deepest.messages) if deepest is not None else 0
        pieces = [piece for message in messages[:past] for piece in data.draw(split(message))]
        assert story.found(*pieces, *messages[past:]) is deepest
        turns.append(story.answer(messages, answer))


@st.composite
def split(draw: st.DrawFn, message: Message) -> list[Message]:
    """A message as a harness may send it back: the text and each call apart."""
    if message.role is not Role.ASSISTANT or not draw(st.booleans()):
        return [message]
    text = [said(message.content)] if message.content else []
    return [*text, *(said("", replace(call, id="x")) for call in message.tool_calls)]


@pytest.mark.parametrize("changes", ["tools", "system prompt"])
def test_a_recalled_history_is_found_again_as_it_was_sent_now(changes: str) -> None:
    """Its tokens may be the same all the same: some templates show neither."""
    story = Story()
    first = story.answer((Message(Role.SYSTEM, "Be brief."), user("Hi.")), said("Hello."))
    recalled = list(first.messages)
    if changes == "tools":
        story.tools = OTHER_TOOLS
    else:
        recalled[0] = Message(Role.SYSTEM, "Be brief. ")
    second = story.turn("second", first, (*recalled, user("And?"), said("Bye.")), 70)
    story.conversations.add(second, story.tools)
    assert story.found(*second.messages, user("So?")) is second
