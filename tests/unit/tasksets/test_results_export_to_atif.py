"""A session becomes a trajectory of steps that says what the recording says, no more and no less."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.errors import InvalidInput
from polar.models.chat import FinishReason, Message, Role, ToolCall
from polar.models.completion import REPLAYED, Completion
from polar.models.session import SessionResult, SessionStatus
from polar.recordings.recording import Recording
from polar.tasksets.atif import write_trajectories
from polar.tasksets.export import ExportedSession
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow
from tests.fakes.agent_sessions import agent_sessions
from tests.fakes.recordings import recording
from tests.fakes.trajectories import documents, exported, written


def of(completions: list[Completion], tmp_path: Path) -> dict[str, Any]:
    return written(exported(completions), tmp_path)


def call(
    index: int,
    messages: tuple[Message, ...],
    response: Message,
    prompt: list[int],
    *,
    follows: str | None = None,
    reason: FinishReason = FinishReason.STOP,
    sampled: int = 2,
) -> Completion:
    return Completion(
        id=f"c{index}",
        index=index,
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.arange(sampled, dtype=np.int32) + 100 * (index + 1),
        logprobs=np.full(sampled, -0.1, np.float32),
        policy_versions=np.full(sampled, index, np.int32),
        messages=messages,
        response=response,
        finish_reason=reason,
        follows=follows,
        ended_at=1_700_000_000.0 + index,
    )


ASKED = Message(Role.USER, "list the files")
CALLS = Message(
    Role.ASSISTANT,
    reasoning="ls will do",
    tool_calls=(ToolCall("call_a", "bash", '{"command": "ls"}'), ToolCall("call_b", "bash", "not json")),
)
DONE = Message(Role.ASSISTANT, "two files")


def answered(id_of_call: str = "call_a") -> tuple[Message, ...]:
    """The second request of a harness that gave the first call an id of its own."""
    first, second = CALLS.tool_calls
    echo = replace(CALLS, reasoning=None, tool_calls=(replace(first, id=id_of_call), second))
    return ASKED, echo, Message(Role.TOOL, "a b", tool_call_id=id_of_call)


def test_a_step_has_what_the_policy_saw_and_sampled(tmp_path: Path) -> None:
    first = call(0, (ASKED,), CALLS, [1, 2])
    second = call(1, answered(), DONE, [1, 2, 100, 101, 3], follows="c0")
    steps = of([first, second], tmp_path)["steps"]
    assert [step["source"] for step in steps] == ["user", "agent", "agent"]
    assert steps[1]["reasoning_content"] == "ls will do"
    metrics = steps[2]["metrics"]
    assert metrics["prompt_token_ids"] == [1, 2, 100, 101, 3]
    assert metrics["completion_token_ids"] == [200, 201]
    assert np.array_equal(np.array(metrics["logprobs"], np.float32), second.logprobs)
    assert metrics["extra"] == {"policy_versions": [1, 1]}
    assert (metrics["prompt_tokens"], metrics["completion_tokens"]) == (5, 2)
    assert steps[2]["extra"] == {
        "completion_id": "c1",
        "finish_reason": "stop",
        "continuation": "clean",
        "trained": True,
    }
    assert steps[2]["timestamp"] == "2023-11-14T22:13:21+00:00"


@pytest.mark.parametrize("id", ["call_a", "theirs"])
def test_a_result_stands_in_the_step_of_its_call(id: str, tmp_path: Path) -> None:
    first = call(0, (ASKED,), CALLS, [1, 2])
    second = call(1, answered(id), DONE, [1, 2, 100, 101, 3], follows="c0")
    step = of([first, second], tmp_path)["steps"][1]
    assert step["observation"]["results"] == [{"source_call_id": "call_a", "content": "a b"}]


def test_arguments_that_are_no_object_are_kept_as_text(tmp_path: Path) -> None:
    step = of([call(0, (ASKED,), CALLS, [1])], tmp_path)["steps"][1]
    assert step["tool_calls"] == [
        {"tool_call_id": "call_a", "function_name": "bash", "arguments": {"command": "ls"}},
        {
            "tool_call_id": "call_b",
            "function_name": "bash",
            "arguments": {},
            "extra": {"arguments": "not json"},
        },
    ]


def test_a_result_of_an_unknown_call_names_it_beside(tmp_path: Path) -> None:
    stray = Message(Role.TOOL, "late", tool_call_id="gone")
    (step, _) = of([call(0, (stray,), DONE, [1])], tmp_path)["steps"]
    assert (step["source"], step["message"]) == ("system", "")
    assert step["observation"]["results"] == [{"content": "late", "extra": {"tool_call_id": "gone"}}]


def test_a_second_continuation_is_a_trajectory_whose_past_is_a_copy(tmp_path: Path) -> None:
    first = call(0, (ASKED,), CALLS, [1, 2])
    hung_up = call(1, answered(), DONE, [1, 2, 100, 101, 3], follows="c0", reason=FinishReason.CANCELLED)
    again = call(2, answered(), DONE, [1, 2, 100, 101, 3], follows="c0", sampled=5)
    root = of([first, hung_up, again], tmp_path)
    assert [step.get("extra", {}).get("completion_id") for step in root["steps"]] == [None, "c0", "c2"]
    (fork,) = root["subagent_trajectories"]
    copy, last = fork["steps"][1:]
    assert copy["is_copied_context"]
    assert "metrics" not in copy
    assert last["extra"] == {
        "completion_id": "c1",
        "finish_reason": "cancelled",
        "continuation": "clean",
        "trained": False,
    }
    assert fork["extra"] == {"lineage": "main", "parent_trajectory_id": root["trajectory_id"]}


def test_sub_agents_stand_beside_the_main_conversation_with_their_parent(tmp_path: Path) -> None:
    first = call(0, (ASKED,), CALLS, [1, 2])
    sub = call(1, (Message(Role.SYSTEM, "search"), Message(Role.USER, "find it")), DONE, [7, 8], sampled=9)
    second = call(2, answered(), DONE, [1, 2, 100, 101, 3], follows="c0")
    root = of([first, sub, second], tmp_path)
    assert root["extra"]["lineage"] == "main"
    (agent,) = root["subagent_trajectories"]
    assert agent["extra"] == {"lineage": "subagent", "parent_trajectory_id": root["trajectory_id"]}
    assert agent["session_id"] == root["session_id"]
    assert agent["trajectory_id"] != root["trajectory_id"]


def test_answers_of_another_session_count_as_copies(tmp_path: Path) -> None:
    replayed = replace(call(0, (ASKED,), CALLS, [1, 2]), extra={REPLAYED: "s0"})
    step = of([replayed], tmp_path)["steps"][1]
    assert step["is_copied_context"]
    assert step["extra"]["replayed_from"] == "s0"


def test_answers_without_tokens_are_steps_without_ids(tmp_path: Path) -> None:
    nothing = np.empty(0, np.int32)
    text = replace(
        call(0, (ASKED,), DONE, []),
        sampled_ids=nothing,
        logprobs=np.empty(0, np.float32),
        policy_versions=nothing,
        extra={"sampled_tokens": "7", "prompt_tokens": "11"},
    )
    metrics = of([text], tmp_path)["steps"][1]["metrics"]
    assert metrics == {"prompt_tokens": 11, "completion_tokens": 7, "cached_tokens": 0}


def test_unsound_logprobs_are_left_out(tmp_path: Path) -> None:
    unsound = replace(call(0, (ASKED,), DONE, [1]), logprobs=np.array([-0.1, np.nan], np.float32))
    metrics = of([unsound], tmp_path)["steps"][1]["metrics"]
    assert metrics["completion_token_ids"] == [100, 101]
    assert "logprobs" not in metrics


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(completions=agent_sessions())
def test_every_sampled_token_is_in_one_step_that_is_no_copy(
    completions: list[Completion], tmp_path: Path
) -> None:
    root = of(completions, tmp_path)
    by_id = {completion.id: completion for completion in completions}
    seen = []
    for document in documents(root):
        assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
        for step in document["steps"]:
            if step["source"] == "agent" and not step.get("is_copied_context"):
                completion = by_id[step["extra"]["completion_id"]]
                seen.append(completion.id)
                assert step["metrics"]["prompt_token_ids"] == completion.prompt_ids.tolist()
                assert step["metrics"].get("completion_token_ids", []) == completion.sampled_ids.tolist()
    assert sorted(seen) == sorted(by_id)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(completions=agent_sessions(), data=st.data())
def test_the_messages_of_a_call_stand_before_it(
    completions: list[Completion], data: st.DataObject, tmp_path: Path
) -> None:
    root = of(completions, tmp_path)
    document = data.draw(st.sampled_from(documents(root)))
    last = document["steps"][-1]
    (completion,) = [one for one in completions if one.id == last["extra"]["completion_id"]]
    assert last["message"] == completion.response.content
    spoken = [step["message"] for step in document["steps"][:-1] if step["source"] != "agent"]
    assert [text for text in spoken if text] == [
        message.content for message in completion.messages if message.role in (Role.SYSTEM, Role.USER)
    ]
    results = [
        result["content"]
        for step in document["steps"]
        for result in step.get("observation", {}).get("results", ())
    ]
    assert results == [message.content for message in completion.messages if message.role is Role.TOOL]


def test_the_outcome_is_told_with_the_trajectory(tmp_path: Path) -> None:
    made = recording(reward=0.5)
    root = written(ExportedSession(made.result, {"level": 2}, made, "pi"), tmp_path)
    assert root["extra"]["result"]["verdict"]["reward"] == 0.5
    assert root["extra"]["metadata"] == {"level": 2}
    assert root["agent"]["name"] == "pi"
    assert (root["agent"]["version"], root["agent"]["model_name"]) == ("1.5.0", "unknown-model")
    assert [tool["function"]["name"] for tool in root["agent"]["tool_definitions"]] == ["bash", "write"]


def test_sessions_without_model_calls_are_counted_and_not_written(tmp_path: Path) -> None:
    made = recording()
    failed = SessionResult(session_id="s9", task_id="t", sample=0, attempt=1, status=SessionStatus.FAILED)
    empty_tree = grow(())
    empty = Recording(empty_tree, PrefixMerging(PrefixMerging.Options()).build(empty_tree), failed)
    sessions = [ExportedSession(made.result, {}, made, "pi"), ExportedSession(failed, {}, None, "pi")]
    counts = write_trajectories([*sessions, ExportedSession(failed, {}, empty, "pi")], tmp_path / "new")
    assert (counts.sessions, counts.without_calls) == (1, 2)
    (path,) = (tmp_path / "new").iterdir()
    assert counts.trajectories == len(documents(json.loads(path.read_text())))


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput, match="file: is a file, not a directory"):
        write_trajectories([], tmp_path / "file")
