"""Datasets hold what was said and sampled, sorted by acceptance, in forms that trainers read."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

from polar.errors import PolarError
from polar.models.chat import Message, Role, ToolCall
from polar.models.session import SessionResult, SessionStatus
from polar.models.trace import Trajectory
from polar.recordings.recording import Recording
from polar.tasksets import parquet_file
from polar.tasksets.conversations import conversations
from polar.tasksets.expressions import parse_acceptance
from polar.tasksets.sft import CARD, Fate, Table, TaskSessions, Written, card, write_dataset
from polar.trajectory.learnable import EndedSession
from polar.trajectory.materialise import materialise
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow
from tests.fakes.recordings import CALL, DONE, TOOL, USER, recording

ACCEPT = parse_acceptance("reward >= 1")


def attempt(session: str, *, sample: int = 0, reward: float = 1.0, said: str | None = None) -> EndedSession:
    """A session whose last answer can be told apart by `said`."""
    made = recording(session, sample=sample, reward=reward)
    completions = made.completions
    if said is not None:
        last = completions[1]
        other = replace(
            last, response=Message(Role.ASSISTANT, said), sampled_ids=last.sampled_ids + len(said)
        )
        completions = (completions[0], other, completions[2])
    trajectory = PrefixMerging(PrefixMerging.Options()).build(grow(completions)).with_reward(reward)
    result = made.result.model_copy(update={"stats": trajectory.stats})
    return EndedSession(result, Recording(grow(completions), trajectory, result))


def without_tokens(given: EndedSession) -> EndedSession:
    """The same from an engine that gave text only."""
    assert given.recording is not None
    nothing = np.empty(0, np.int32)
    completions = tuple(
        replace(
            one,
            prompt_ids=nothing,
            sampled_ids=nothing,
            logprobs=np.empty(0, np.float32),
            policy_versions=nothing,
            parent=None,
            follows=one.parent,
            untrainable="the engine gives no token ids",
        )
        for one in given.recording.completions
    )
    return EndedSession(given.result, Recording(grow(completions), Trajectory((), ()), given.result))


def failed(session: str) -> EndedSession:
    status = SessionStatus.FAILED
    about = {"session_id": session, "task_id": "t", "sample": 0, "attempt": 1, "error": "no sandbox"}
    return EndedSession(SessionResult.model_validate({**about, "status": status}), None)


def group(*attempts: EndedSession, task: str = "t") -> TaskSessions:
    return TaskSessions(task, "pi", {"level": 2}, attempts)


def read(directory: Path, table: Table) -> list[dict[Hashable, Any]]:
    return pd.read_parquet(directory / table.file).to_dict("records")


def test_an_accepted_session_is_messages_with_its_tools(tmp_path: Path) -> None:
    written = write_dataset([group(attempt("s1"))], tmp_path, ACCEPT)
    (row,) = read(tmp_path, Table.SFT)
    assert [message["role"] for message in row["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row["messages"][1]["content"] == USER.content
    call = row["messages"][2]["tool_calls"][0]
    assert (call["id"], call["function"]["name"]) == ("call_0", "bash")
    assert json.loads(call["function"]["arguments"]) == {"command": "echo hello"}
    assert row["messages"][3]["tool_call_id"] == "call_0"
    assert row["messages"][4]["content"] == DONE.content
    assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == ["bash", "write"]
    assert row["prompt_messages"] == 2
    assert (written.fates, written.tasks_accepted) == ({Fate.ACCEPTED: 1}, 1)


def test_its_tokens_are_those_of_its_trace(tmp_path: Path) -> None:
    given = attempt("s1")
    assert given.recording is not None
    trajectory = given.recording.trajectory
    written = write_dataset([group(given)], tmp_path, ACCEPT)
    (row,) = read(tmp_path, Table.TOKENS)
    trace = materialise(trajectory, trajectory.traces[0])
    before = row["prompt_length"]
    assert row["input_ids"].tolist() == [*trace.prompt_ids, *trace.response_ids]
    assert row["loss_mask"][before:].tolist() == trace.loss_mask.tolist()
    assert row["logprobs"][before:].tolist() == trace.logprobs.tolist()
    assert row["policy_versions"][before:].tolist() == trace.policy_versions.tolist()
    assert not row["loss_mask"][:before].any()
    trained = row["loss_mask"] == 1
    assert (row["labels"][trained] == row["input_ids"][trained]).all()
    assert (row["labels"][~trained] == -100).all()
    assert written.trained_tokens == trained.sum() == trajectory.stats.trainable_tokens


def test_every_row_says_where_it_comes_from(tmp_path: Path) -> None:
    write_dataset([group(attempt("s1", sample=3))], tmp_path, ACCEPT)
    for table in (Table.SFT, Table.TOKENS):
        (row,) = read(tmp_path, table)
        assert (row["task"], row["sample"], row["session"], row["harness"]) == ("t", 3, "s1", "pi")
        assert (row["harness_version"], row["model"], row["reward"]) == ("1.5.0", "unknown-model", 1.0)
        assert (row["policy_version_min"], row["policy_version_max"]) == (3, 4)
        assert json.loads(row["components"]) == {"exists": 0.3, "right": 0.7}
        assert json.loads(row["metadata"]) == {"level": 2}
        assert (row["completions"], row["lineage"]) == (3, "main")


def test_the_same_answer_twice_is_kept_once_a_task(tmp_path: Path) -> None:
    same = [attempt("s1"), attempt("s2", sample=1), attempt("s3", sample=2, said="other")]
    written = write_dataset([group(*same), group(attempt("u1"), task="u")], tmp_path, ACCEPT)
    assert [row["session"] for row in read(tmp_path, Table.SFT)] == ["s1", "s3", "u1"]
    assert written.fates == {Fate.ACCEPTED: 3, Fate.DUPLICATE: 1}


def test_rejected_attempts_stand_apart_and_are_paired_with_accepted_ones(tmp_path: Path) -> None:
    attempts = [
        attempt("bad1", reward=0.0, said="no"),
        attempt("good", reward=1.0),
        attempt("bad2", reward=0.5, said="nearly"),
        failed("lost"),
    ]
    alone = group(attempt("v1", reward=0.0), task="v")
    written = write_dataset([group(*attempts), alone], tmp_path, ACCEPT)
    assert [row["session"] for row in read(tmp_path, Table.REJECTED)] == ["bad1", "bad2", "v1"]
    (pair,) = read(tmp_path, Table.PREFERENCE)
    assert (pair["chosen_session"], pair["rejected_session"]) == ("good", "bad1")
    assert (pair["chosen_reward"], pair["rejected_reward"], pair["prompts_equal"]) == (1.0, 0.0, True)
    assert [message["role"] for message in pair["prompt"]] == ["system", "user"]
    assert pair["chosen"][-1]["content"] == DONE.content
    assert pair["rejected"][-1]["content"] == "no"
    assert written.fates == {Fate.ACCEPTED: 1, Fate.REJECTED: 3, Fate.FAILED: 1}
    assert (written.tasks, written.tasks_accepted) == (2, 1)


def test_an_engine_of_text_only_gives_messages_only(tmp_path: Path) -> None:
    attempts = [
        without_tokens(attempt("s1")),
        without_tokens(attempt("s2", sample=1)),
        without_tokens(attempt("s3", sample=2, said="other")),
    ]
    written = write_dataset([group(*attempts)], tmp_path, ACCEPT)
    rows = read(tmp_path, Table.SFT)
    # The title that was asked for beside the task is a conversation of its own.
    assert [(row["session"], row["conversation"]) for row in rows] == [
        ("s1", 0),
        ("s1", 1),
        ("s3", 0),
        ("s3", 1),
    ]
    assert len(rows[0]["messages"]) == 5
    assert rows[0]["prompt_messages"] == 2
    assert written.rows[Table.TOKENS] == 0


def test_a_condition_that_cannot_be_applied_accepts_nothing_and_is_told(tmp_path: Path) -> None:
    accept = parse_acceptance("components.tests >= 1")
    written = write_dataset([group(attempt("s1"))], tmp_path, accept)
    assert written.fates == {Fate.REJECTED: 1}
    assert written.unjudged == "session s1: unknown name 'tests'; known: exists, right"


def test_what_a_harness_left_out_of_its_echo_is_there(tmp_path: Path) -> None:
    given = attempt("s1")
    assert given.recording is not None
    first, second, side = given.recording.completions
    thought = replace(first, response=replace(CALL, reasoning="First I think."))
    changed = replace(given.recording, tree=grow((thought, second, side)))
    (conversation,) = conversations(changed)
    assert conversation.messages[2]["reasoning_content"] == "First I think."


def test_ids_that_were_made_up_are_numbered_and_those_that_were_sampled_kept() -> None:
    given = attempt("s1").recording
    assert given is not None
    first, second, side = given.completions
    for id, kept in (("call_9f3a", "call_0"), ("functions.bash:0", "functions.bash:0")):
        call = replace(CALL, tool_calls=(ToolCall(id, "bash", "{}"),))
        one = replace(first, response=call)
        tool = replace(TOOL, tool_call_id=id)
        two = replace(second, messages=(*second.messages[:2], call, tool))
        (conversation,) = conversations(replace(given, tree=grow((one, two, side))))
        assert conversation.messages[2]["tool_calls"][0]["id"] == kept
        assert conversation.messages[3]["tool_call_id"] == kept


def test_a_failure_half_way_leaves_what_was_there_before(tmp_path: Path) -> None:
    write_dataset([group(attempt("old"))], tmp_path, ACCEPT)

    def broken() -> Iterator[TaskSessions]:
        yield group(attempt("new"))
        raise PolarError("the server went away")

    with pytest.raises(PolarError, match="went away"):
        write_dataset(broken(), tmp_path, ACCEPT)
    assert [row["session"] for row in read(tmp_path, Table.SFT)] == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(table.file for table in Table)


def load(directory: Path, table: Table, cache: Path) -> Any:
    return datasets.load_dataset(str(directory), table.value, split="train", cache_dir=str(cache))


def test_the_card_makes_it_loadable_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    written = write_dataset([group(attempt("a"), attempt("b", reward=0.0, said="no"))], out, ACCEPT)
    (out / CARD).write_text(card("out", written, [("accept", "reward >= 1 | `x`")]))
    (out / ".polar").mkdir()
    (out / ".polar" / "polar.db").write_bytes(b"not data")
    assert set(datasets.get_dataset_config_names(str(out))) == set(Table)
    assert datasets.get_dataset_default_config_name(str(out)) == Table.SFT
    tables = {table: load(out, table, tmp_path / "cache") for table in Table}
    assert {table: len(rows) for table, rows in tables.items()} == written.rows
    assert tables[Table.SFT][0]["messages"][-1]["content"] == DONE.content
    assert {"prompt", "chosen", "rejected", "tools"} <= set(tables[Table.PREFERENCE].features)


def test_only_tables_with_rows_are_named_to_loaders(tmp_path: Path) -> None:
    out = tmp_path / "out"
    written = write_dataset([group(attempt("a", reward=0.0))], out, ACCEPT)
    (out / CARD).write_text(card("out", written, []))
    assert datasets.get_dataset_config_names(str(out)) == ["rejected"]
    assert len(datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))) == 1


def test_memory_does_not_grow_with_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROWS_PER_GROUP", 32)
    one = [attempt("s1"), attempt("s2", reward=0.0, said="no")]

    def once(tasks: int) -> int:
        gc.collect()
        tracemalloc.start()
        groups = (group(*one, task=f"t{number}") for number in range(tasks))
        written = write_dataset(groups, tmp_path / str(tasks), ACCEPT)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert written.rows[Table.SFT] == tasks
        return most

    def peak(tasks: int) -> int:
        """The least of three: other threads of this process can only add to it."""
        return min(once(tasks) for _ in range(3))

    once(10)
    assert peak(600) < 1.5 * peak(100)


def test_nothing_at_all_is_an_empty_dataset(tmp_path: Path) -> None:
    written = write_dataset([], tmp_path, ACCEPT)
    assert written == Written(rows=dict.fromkeys(Table, 0))
    assert "Tried: 0." in card("none", written, [])
    assert all(len(read(tmp_path, table)) == 0 for table in Table)
