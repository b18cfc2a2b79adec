"""A chat call is written in OpenAI's words, and an answer reads the same however it is split."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.engines.base import ChatCall, ChatChunk, EngineError
from polar.engines.chat_wire import ChatReader, request_body
from polar.models.chat import (
    ChatRequest,
    FinishReason,
    JsonOutput,
    Message,
    Role,
    Sampling,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolUse,
    Usage,
)
from tests.fakes.character_chat import Said, document, events, logprob_of, prompt_ids

LS = ToolDefinition("ls", "List.", {"type": "object", "properties": {}})
CAT = ToolDefinition("cat")
HELLO = (Message(Role.USER, "Hi"),)
ASKED = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "return_token_ids": True,
    "logprobs": True,
}


def body(**changes: Any) -> dict[str, Any]:
    chat = ChatRequest("m", HELLO, **changes)
    return request_body(ChatCall("r", chat, chat.sampling), "served", stream=False)


def read(answer: list[dict[str, Any]], *, has_tokens: bool = True, stop: str = "") -> list[ChatChunk]:
    reader = ChatReader("http://x", lambda: 7, (stop,) if stop else (), has_tokens=has_tokens)
    return [*filter(None, map(reader.read, answer)), reader.last()]


def told(chunks: list[ChatChunk]) -> tuple[Any, ...]:
    """What an answer amounts to, however many chunks it came in."""
    tokens = [chunk.tokens for chunk in chunks if chunk.tokens]
    return (
        "".join(chunk.delta.content for chunk in chunks),
        "".join(chunk.delta.reasoning for chunk in chunks),
        [call for chunk in chunks for call in chunk.delta.tool_calls],
        [id for chunk in tokens for id in chunk.ids],
        [logprob for chunk in tokens for logprob in chunk.logprobs],
        {chunk.policy_version for chunk in tokens},
        [chunk.prompt_ids.tolist() for chunk in chunks if chunk.prompt_ids is not None],
        chunks[-1].finish_reason,
        chunks[-1].usage,
        chunks[-1].untrainable,
    )


def test_messages_keep_calls_results_and_thoughts() -> None:
    call = ToolCall("c1", "ls", '{"a": 1}')
    history = (
        Message(Role.SYSTEM, "Be brief."),
        Message(Role.ASSISTANT, "", reasoning="Hm.", tool_calls=(call,)),
        Message(Role.TOOL, "a.txt", tool_call_id="c1", name="ls"),
    )
    sent = request_body(ChatCall("r", ChatRequest("m", history), Sampling()), "served", stream=False)
    function = {"name": "ls", "arguments": '{"a": 1}'}
    assert sent == {
        "model": "served",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "a.txt", "tool_call_id": "c1", "name": "ls"},
        ],
    }


def test_sampling_and_biases_are_passed_on() -> None:
    sampling = Sampling(0.5, 0.9, 40, 3, 12, ("END",), ((5, -1.5), (9, 2.0)), 0.5, -1.0)
    sent = body(sampling=sampling)
    del sent["model"], sent["messages"]
    assert sent == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 3,
        "max_tokens": 12,
        "stop": ["END"],
        "logit_bias": {"5": -1.5, "9": 2.0},
        "presence_penalty": 0.5,
        "frequency_penalty": -1.0,
    }


@pytest.mark.parametrize(
    ("choice", "offered", "worded"),
    [
        (ToolChoice(), ["ls", "cat"], None),
        (ToolChoice(ToolUse.NONE), ["ls", "cat"], "none"),
        (ToolChoice(ToolUse.REQUIRED), ["ls", "cat"], "required"),
        (
            ToolChoice(ToolUse.REQUIRED, ("cat",)),
            ["cat"],
            {"type": "function", "function": {"name": "cat"}},
        ),
        (ToolChoice(ToolUse.REQUIRED, ("cat", "ls")), ["ls", "cat"], "required"),
    ],
)
def test_a_tool_choice_is_worded_as_every_server_takes_it(
    choice: ToolChoice, offered: list[str], worded: Any
) -> None:
    sent = body(tools=(LS, CAT), tool_choice=choice)
    assert [tool["function"]["name"] for tool in sent["tools"]] == offered
    assert sent.get("tool_choice") == worded
    assert "parallel_tool_calls" not in sent


def test_one_call_at_a_time_and_json_are_asked_for() -> None:
    one = body(tools=(LS,), tool_choice=ToolChoice(parallel=False))
    assert one["parallel_tool_calls"] is False
    assert body(output=JsonOutput())["response_format"] == {"type": "json_object"}
    schema = {"type": "object"}
    assert body(output=JsonOutput(schema, "city"))["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": schema, "strict": True},
    }


@given(
    st.builds(
        Said,
        content=st.text(st.characters(codec="utf-8"), max_size=8),
        reasoning=st.text(max_size=4),
        calls=st.lists(
            st.tuples(st.sampled_from(["ls", "cat"]), st.dictionaries(st.text(max_size=3), st.integers())),
            max_size=3,
        ).map(tuple),
    )
)
def test_a_stream_says_what_the_whole_answer_says(said: Said) -> None:
    whole = told(read([document(said, ASKED)]))
    assert told(read([*events(said, ASKED)])) == whole
    ids = said.tokens
    assert whole[:2] == (said.content, said.reasoning)
    assert whole[3:7] == (ids, [logprob_of(id) for id in ids], {7}, [prompt_ids(ASKED)])
    assert [call.name for call in whole[2]] == [name for name, _ in said.calls]
    assert whole[8:] == (Usage(len(prompt_ids(ASKED)), len(ids)), None)


def test_a_tool_call_comes_when_the_next_one_begins() -> None:
    chunks = read([*events(Said("", calls=(("ls", {"a": 1}), ("cat", {}))), ASKED)])
    with_calls = [(chunk.delta.tool_calls, chunk.finish_reason) for chunk in chunks if chunk.delta.tool_calls]
    assert with_calls == [
        ((ToolCall("call-0", "ls", '{"a":1}'),), None),
        ((ToolCall("call-1", "cat", "{}"),), FinishReason.TOOL_CALLS),
    ]


def test_the_stop_sequence_that_ended_it_is_named() -> None:
    answer = document(Said("so far", stop="END"), ASKED)
    assert read([answer], stop="END")[-1].stop_sequence == "END"
    answer["choices"][0]["stop_reason"] = 2  # the id of an end-of-turn token
    assert read([answer], stop="END")[-1].stop_sequence is None


def _without_ids(choice: dict[str, Any], root: dict[str, Any]) -> None:
    choice["token_ids"] = None


def _without_logprobs(choice: dict[str, Any], root: dict[str, Any]) -> None:
    choice["logprobs"] = None


def _short_of_a_logprob(choice: dict[str, Any], root: dict[str, Any]) -> None:
    choice["logprobs"]["content"].pop()


def _with_a_null_logprob(choice: dict[str, Any], root: dict[str, Any]) -> None:
    choice["logprobs"]["content"][0]["logprob"] = None


def _without_prompt(choice: dict[str, Any], root: dict[str, Any]) -> None:
    root["prompt_token_ids"] = None


def _miscounted(choice: dict[str, Any], root: dict[str, Any]) -> None:
    root["usage"]["completion_tokens"] += 1


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_without_ids, "the engine sent logprobs without token ids"),
        (_without_logprobs, "the engine sent 3 token ids with 0 logprobs"),
        (_short_of_a_logprob, "the engine sent 3 token ids with 2 logprobs"),
        (_with_a_null_logprob, "the engine sent 3 token ids with 3 logprobs"),
        (_without_prompt, "the engine gave no prompt ids"),
        (_miscounted, "the engine counts 4 sampled tokens but sent 3 token ids"),
    ],
)
def test_tokens_that_do_not_add_up_are_untrainable_but_the_answer_stands(harm: Any, reason: str) -> None:
    answer = document(Said("hi"), ASKED)
    harm(answer["choices"][0], answer)
    (chunk,) = read([answer])
    assert chunk.untrainable == reason
    assert (chunk.delta.content, chunk.finish_reason) == ("hi", FinishReason.STOP)
    assert chunk.tokens is None or len(chunk.tokens.ids) == len(chunk.tokens.logprobs)


@pytest.mark.parametrize("ids", [["a"], [1.5], [2**31], {"a": 1}, 7])
def test_a_prompt_that_is_no_array_of_ids_is_the_engines_failure(ids: Any) -> None:
    answer = document(Said("hi"), ASKED) | {"prompt_token_ids": ids}
    with pytest.raises(EngineError, match="not one of a chat"):
        read([answer])


def test_text_alone_is_never_trainable() -> None:
    (chunk,) = read([document(Said("hi"), ASKED)], has_tokens=False)
    assert (chunk.tokens, chunk.prompt_ids) == (None, None)
    assert chunk.untrainable == "the engine gives no token ids"
    assert chunk.usage == Usage(5, 3)


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "out of memory"}},
        {"choices": [{"delta": {}, "finish_reason": "abort"}]},
        {"choices": ["no object"]},
        {"choices": [{"delta": {"content": [1]}}]},
        {"choices": [{"delta": {}, "logprobs": {"content": [{}]}}]},
        {"choices": [{"delta": {"tool_calls": [5]}}]},
    ],
)
def test_what_is_no_answer_is_an_engine_error(event: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        read([event])


def test_a_refusal_after_the_first_word_is_no_refusal_of_the_request() -> None:
    """The request would be asked anew, and the client told two answers in one."""
    reader = ChatReader("http://x", int, (), has_tokens=False)
    assert reader.read({"choices": [{"delta": {"content": "Hel"}}]}) is not None
    with pytest.raises(EngineError) as raised:
        reader.read({"error": {"code": 400, "message": "logprobs is not supported"}})
    assert type(raised.value) is EngineError


def test_an_answer_that_breaks_off_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="ended before the completion"):
        read([*events(Said("hi"), ASKED)][:2])
