"""Task files in every form they may have become the tasks they say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.models.task import Branching, TaskSpec
from polar.tasksets.files import load_tasks
from polar.tasksets.task_document import with_defaults

TASK = {"id": "a", "instruction": "do it", "harness": "h", "evaluator": "e"}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_yaml_file_may_hold_one_task(tmp_path: Path) -> None:
    file = write(tmp_path / "t.yaml", "id: a\ninstruction: do it\nharness: h\nevaluator: e\nsamples: 3\n")
    (task,) = load_tasks(file)
    assert (task.id, task.samples, task.harness.name) == ("a", 3, "h")


def test_defaults_lie_under_every_task(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.yml",
        """
        defaults:
          harness: {name: h, options: {tools: [bash], depth: 1}}
          evaluator: e
          samples: 4
          budgets: {run_seconds: 60, max_completions: 4}
          metadata: {set: s}
          branching: {at: s, samples: 4}
        tasks:
          - {id: a, instruction: do it}
          - id: b
            instruction: do it
            samples: 2
            budgets: {run_seconds: 5}
            metadata: {level: 1}
            branching: {depth: 2}
            harness: {options: {depth: 2}}
          - {id: c, instruction: do it, harness: {name: other, options: {x: 1}}, branching: null}
          - {id: d, instruction: do it, harness: h}
        """,
    )
    a, b, c, d = load_tasks(file)
    assert (a.samples, a.budgets.run_seconds, a.harness.options) == (4, 60, {"tools": ["bash"], "depth": 1})
    assert (b.samples, b.budgets.run_seconds, b.budgets.max_completions) == (2, 5, 4)
    assert b.metadata == {"set": "s", "level": 1}
    assert b.branching == Branching.model_validate({"at": "s", "samples": 4, "depth": 2})
    assert b.harness.options == {"tools": ["bash"], "depth": 2}
    assert (c.harness.name, c.harness.options, c.branching) == ("other", {"x": 1}, None)
    assert (d.harness.name, d.harness.options) == ("h", {})


def test_json_holds_a_task_a_list_or_defaults_and_tasks(tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", json.dumps(TASK))
    many = write(tmp_path / "many.json", json.dumps([{**TASK, "id": "b"}, {**TASK, "id": "c"}]))
    rest = {key: value for key, value in TASK.items() if key != "id"}
    shared = write(tmp_path / "shared.json", json.dumps({"defaults": rest, "tasks": [{"id": "d"}]}))
    assert [task.id for task in load_tasks(one, many, shared)] == ["a", "b", "c", "d"]


def test_jsonl_holds_a_task_a_line(tmp_path: Path) -> None:
    lines = [json.dumps({**TASK, "id": f"t{n}", "instruction": "line\u2028separator"}) for n in range(3)]
    file = write(tmp_path / "t.jsonl", "\n".join(lines) + "\n\n")
    assert [task.id for task in load_tasks(file)] == ["t0", "t1", "t2"]


def test_a_directory_stands_for_its_task_files_sorted(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.json", "c.jsonl"):
        write(tmp_path / name, json.dumps({**TASK, "id": name}))
    write(tmp_path / ".hidden.yaml", "not a task")
    write(tmp_path / "notes.txt", "not a task")
    write(tmp_path / "data" / "inner.json", "not a task")
    assert [task.id for task in load_tasks(tmp_path)] == ["a.json", "b.yaml", "c.jsonl"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (json.dumps(TASK), ["a"]),
        (json.dumps(TASK) + "\n" + json.dumps({**TASK, "id": "b"}), ["a", "b"]),
        (json.dumps(TASK, indent=2), ["a"]),
        ("- {id: a, instruction: x, harness: h, evaluator: e}", ["a"]),
    ],
)
def test_standard_input_is_read_whatever_its_format(
    text: str, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert [task.id for task in load_tasks(Path("-"))] == ids


def test_files_are_read_in_from_beside_the_task_file(tmp_path: Path) -> None:
    write(tmp_path / "data" / "notes.txt", "grüß\n")
    (tmp_path / "data" / "image.bin").write_bytes(b"\xff\x00\x01")
    write(tmp_path / "data" / "run.sh", "#!/bin/sh\n").chmod(0o755)
    task = {
        **TASK,
        "files": {
            "notes.txt": {"path": "data/notes.txt"},
            "image.bin": {"path": "data/image.bin"},
            "run.sh": {"path": "data/../data/run.sh"},
            "plain.sh": {"path": "data/run.sh", "executable": False},
            "inline.txt": {"text": "inline"},
        },
    }
    (loaded,) = load_tasks(write(tmp_path / "t.json", json.dumps(task)))
    assert loaded.files["notes.txt"].text == "grüß\n"
    assert loaded.files["image.bin"].data == b"\xff\x00\x01"
    assert loaded.files["run.sh"].executable
    assert not loaded.files["notes.txt"].executable
    assert not loaded.files["plain.sh"].executable
    assert loaded.files["inline.txt"].data == b"inline"


def test_an_evaluators_own_files_are_read_in_too(tmp_path: Path) -> None:
    write(tmp_path / "check.sh", "exit 0\n")
    options = {"command": "sh check.sh", "files": {"check.sh": {"path": "check.sh"}}}
    task = {**TASK, "evaluator": {"name": "command", "options": options}}
    (loaded,) = load_tasks(write(tmp_path / "t.json", json.dumps(task)))
    assert loaded.evaluator.options["files"] == {"check.sh": {"text": "exit 0\n", "executable": False}}


def test_yaml_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = """
    - &first {id: a, instruction: x, harness: h, evaluator: e, samples: 2}
    - {<<: *first, id: b}
    """
    assert [(task.id, task.samples) for task in load_tasks(write(tmp_path / "t.yaml", text))] == [
        ("a", 2),
        ("b", 2),
    ]


def test_the_quickstart_tasks_load() -> None:
    root = Path(__file__).parents[3]
    tasks = load_tasks(root / "examples" / "quickstart")
    assert len(tasks) >= 4
    assert all(task.samples == 4 and task.harness.name == "pi" for task in tasks)


documents = st.dictionaries(
    st.sampled_from([*TaskSpec.model_fields]),
    st.one_of(st.text(), st.integers(), st.dictionaries(st.text(), st.text() | st.none())),
)


@given(documents, documents)
def test_what_a_task_says_itself_wins_and_nothing_else_is_lost(
    task: dict[str, Any], defaults: dict[str, Any]
) -> None:
    merged = with_defaults(task, defaults)
    assert merged.keys() == task.keys() | defaults.keys()
    for key, value in task.items():
        if isinstance(value, dict) and isinstance(merged[key], dict):
            assert {name: merged[key][name] for name in value} == value
        else:
            assert merged[key] == value
    for key in defaults.keys() - task.keys():
        assert merged[key] == defaults[key]
