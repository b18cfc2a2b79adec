"""A history that echoes Responses' items is found as the conversation that was sampled, whatever it says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.dialects.base import (
    Answer,
    CallIdentity,
    HttpRequest,
    Recall,
    Refusal,
    RequestRefused,
    recall_nothing,
)
from polar.dialects.openai_responses import OpenAIResponses
from polar.gateway.conversation import Conversations
from polar.models.chat import ChatRequest, FinishReason, Message, Role, ToolCall, Usage
from polar.recordings.growth import GrowingTree

DIALECT = OpenAIResponses()
WHO = CallIdentity("abc", "m", 5)
USER = {"role": "user", "content": "hi"}
TOOLS = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "patch"},
    {"type": "local_shell"},
    {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]},
    {"type": "namespace", "name": "web", "tools": [{"type": "custom", "name": "find"}]},
]
NAMES = ["f", "patch", "local_shell", "crm__find", "web__find", "unknown"]

TEXT = st.text(max_size=8)
VALUES = st.none() | st.booleans() | st.integers(-9, 99) | TEXT | st.lists(TEXT, max_size=3)
KEYS = st.sampled_from(["input", "command", "env", "timeout_ms", "working_directory", "user", "other"])
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3).map(json.dumps) | st.sampled_from(
    ["", "[", '"x"', "{}"]
)
CALLS = st.builds(ToolCall, TEXT.map(lambda text: f"call_{text}"), st.sampled_from(NAMES), ARGUMENTS)
PIECES = st.lists(
    st.tuples(st.just("reasoning"), TEXT.filter(bool))
    | st.tuples(st.just("text"), TEXT.filter(bool))
    | st.tuples(st.just("tool_call"), CALLS),
    max_size=6,
)


def request(*items: Any, recall: Recall = recall_nothing) -> ChatRequest:
    body = {
        "model": "m",
        "input": [USER, *items],
        "tools": TOOLS,
        "include": ["reasoning.encrypted_content"],
    }
    return DIALECT.parse(HttpRequest(DIALECT.routes[0], json.dumps(body).encode(), recall=recall))


def said(pieces: list[tuple[str, Any]]) -> Message:
    of = {
        kind: [piece for name, piece in pieces if name == kind] for kind in ("reasoning", "text", "tool_call")
    }
    return Message(
        Role.ASSISTANT, "".join(of["text"]), "".join(of["reasoning"]) or None, tuple(of["tool_call"])
    )


def check_echo(output: list[Any], message: Message) -> None:
    """What follows the echo extends the turn that sampled the message, which is read as it was."""
    first = request()
    ids = np.array([1], np.int32)
    turn = GrowingTree().prove("abc", ids, ids, (*first.messages, message))
    conversations = Conversations()
    conversations.add(turn, first.tools)
    references = [{"type": "item_reference", "id": item["id"]} for item in output]
    for items in (output, references, [{"id": item["id"]} for item in output]):
        echoed = request(*items, USER, recall=conversations.recall)
        extension = conversations.find(echoed.messages, echoed.tools)
        assert extension.turn is turn
        assert len(extension.new_messages) == 1
        assert echoed.messages[1].reasoning == message.reasoning


@given(PIECES)
def test_a_streamed_answer_is_found_again(pieces: list[tuple[str, Any]]) -> None:
    (stream,) = DIALECT.stream(WHO, request())
    data = stream.start() + b"".join(getattr(stream, name)(piece) for name, piece in pieces)
    data += stream.finish(FinishReason.STOP, Usage(1, 1))
    last = data.strip().split(b"\n\n")[-1].partition(b"\ndata: ")[2]
    check_echo(json.loads(last)["response"]["output"], said(pieces))


@given(PIECES)
def test_a_plain_answer_is_found_again(pieces: list[tuple[str, Any]]) -> None:
    answer = Answer(said(pieces), FinishReason.STOP, Usage(1, 1))
    check_echo(json.loads(DIALECT.respond(WHO, request(), [answer]))["output"], said(pieces))


@pytest.mark.parametrize(
    "id", ["fc_abc_1", "fc_abd_0", "rs_abc_0", "x_abc_0", "msg_abc", "fc_abc_" + "9" * 5000, "", "resp_abc"]
)
def test_a_reference_to_no_item_of_the_session_is_refused(id: str) -> None:
    said = {"abc": (Message(Role.ASSISTANT, "", None, (ToolCall("c", "f", "{}"),)),)}
    with pytest.raises(RequestRefused) as caught:
        request({"type": "item_reference", "id": id}, recall=said.get)
    assert (caught.value.refusal, caught.value.field) == (Refusal.MALFORMED, "input[1].id")
