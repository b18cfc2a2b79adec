"""A card names the licence of the tasks, what came of the sessions, and how they were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from polar.models.session import SessionStatus
from polar.tasksets.expressions import parse_acceptance
from polar.tasksets.files import read_tasks
from polar.tasksets.sft import TaskSessions, card, write_dataset
from polar.trajectory.learnable import EndedSession
from tests.fakes.recordings import recording

ACCEPT = parse_acceptance("reward >= 1")


def group(task: str, *rewards: float, harness: str = "pi", **metadata: str) -> TaskSessions:
    made = [recording(f"{task}-{reward}", reward=reward) for reward in rewards]
    return TaskSessions(task, harness, metadata, [EndedSession(one.result, one) for one in made])


def written(directory: Path, *groups: TaskSessions, options: Any = ()) -> tuple[dict[str, Any], str]:
    """The card's front matter and its text."""
    text = card("data", write_dataset(groups, directory, ACCEPT), options)
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def rows(body: str, head: str) -> list[list[str]]:
    """The cells of the table whose first column is called so."""
    (table,) = [part for part in body.split("\n\n") if part.startswith(f"| {head} ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_a_licence_is_said_as_the_hub_spells_it_and_as_the_tasks_do(tmp_path: Path) -> None:
    groups = [group("a", 1.0, licence="MIT"), group("b", 1.0, license="BSD-3-Clause")]
    groups += [group("c", 1.0, licence="PSF-2.0")]
    front, body = written(tmp_path, *groups)
    assert front["license"] == ["bsd-3-clause", "mit", "other"]
    assert rows(body, "licence") == [["BSD-3-Clause", "1"], ["MIT", "1"], ["PSF-2.0", "1"]]


def test_no_licence_is_claimed_for_tasks_that_state_none(tmp_path: Path) -> None:
    front, body = written(tmp_path, group("a", 1.0, licence="MIT"), group("b", 1.0))
    assert "license" not in front
    assert rows(body, "licence") == [["MIT", "1"], ["not stated", "1"]]


def test_a_taskset_states_the_licence_of_all_its_tasks(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "instruction": "x", "metadata": {"level": 1}}\n')
    (tmp_path / "taskset.yaml").write_text(
        "source: rows.jsonl\n"
        "defaults: {harness: pi, evaluator: session_completed, metadata: {licence: Apache-2.0}}\n"
    )
    (task,) = read_tasks(tmp_path).all_or_nothing()
    one = recording("s")
    front, _ = written(
        tmp_path / "out", TaskSessions("a", "pi", task.metadata, [EndedSession(one.result, one)])
    )
    assert front["license"] == ["apache-2.0"]


def test_sessions_are_counted_by_harness_version_and_model(tmp_path: Path) -> None:
    failed = recording("f").result.model_copy(
        update={"status": SessionStatus.FAILED, "harness_version": None, "model": None}
    )
    lost = TaskSessions("c", "codex", {}, [EndedSession(failed, None)])
    _, body = written(tmp_path, group("a", 1.0), group("b", 0.0, harness="codex"), lost)
    stats = recording("s").result.stats
    sampled, trained = str(stats.sampled_tokens), str(stats.trainable_tokens)
    assert int(sampled) > 0
    assert rows(body, "harness") == [
        ["pi", "1.5.0", "unknown-model", "1", "1", "0", "0", "0", "0", sampled, trained],
        ["codex", "1.5.0", "unknown-model", "1", "0", "1", "0", "0", "0", sampled, "0"],
        ["codex", "–", "–", "1", "0", "0", "0", "0", "1", sampled, "0"],
    ]
    assert "Tried: 3. With an accepted session: 1." in body


def test_the_command_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    options = [("taskset", "my tasks.yaml"), ("harness", "pi"), ("seed", None), ("accept", "reward >= 1")]
    _, body = written(tmp_path, options=options)
    assert "polar generate --taskset 'my tasks.yaml' --harness pi --accept 'reward >= 1'\n" in body
    assert 'load_dataset("path/to/this"' in body


def test_what_is_pushed_says_where_it_is_loaded_from(tmp_path: Path) -> None:
    _, body = written(tmp_path, options=[("push-to-hub", "me/data")])
    assert 'load_dataset("me/data", "sft", split="train")' in body
