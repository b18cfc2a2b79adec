"""Every problem of a task file is named by file, task and field, all of them at once."""

from __future__ import annotations

import json
import re
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.config.documents import parse_json, parse_yaml
from polar.errors import InvalidInput
from polar.tasksets.files import MAX_PROBLEMS_SHOWN, load_tasks

TASK = {"id": "a", "instruction": "do it", "harness": "h", "evaluator": "e"}


def problem(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidInput) as caught:
        load_tasks(path)
    return str(caught.value)


def test_each_field_of_each_task_is_named(tmp_path: Path) -> None:
    said = problem(
        tmp_path / "t.json",
        [
            {**TASK, "id": "x", "samples": 0, "budgets": {"run_seconds": -1}},
            {"instruction": "no id", "harness": "h", "evaluator": "e"},
            {**TASK, "id": "y", "instructions": "typo"},
            "text",
        ],
    )
    lines = said.split("\n  ")
    file = tmp_path / "t.json"
    assert lines[0] == "5 problems:"
    assert lines[1] == f"{file}: task 'x': samples: Input should be greater than or equal to 1"
    assert lines[2] == f"{file}: task 'x': budgets.run_seconds: Input should be greater than 0"
    assert lines[3] == f"{file}: task 2: id: is required"
    assert lines[4] == f"{file}: task 'y': instructions: unknown key (did you mean 'instruction'?)"
    assert lines[5] == f"{file}: task 4: must be a mapping, not a str"


def test_one_problem_is_one_line(tmp_path: Path) -> None:
    assert "\n" not in problem(tmp_path / "t.json", {**TASK, "samples": 0})


def test_very_many_problems_are_counted_not_listed(tmp_path: Path) -> None:
    said = problem(tmp_path / "t.json", [{**TASK, "id": f"t{n}", "samples": 0} for n in range(100)])
    assert len(said.split("\n")) == MAX_PROBLEMS_SHOWN + 2
    assert said.endswith("and 80 more")


def test_problems_of_several_files_come_together(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("id: [")
    (tmp_path / "b.yaml").write_text("id: b")
    with pytest.raises(InvalidInput) as caught:
        load_tasks(tmp_path)
    assert re.search(r"a\.yaml:\d+:\d+: not YAML", str(caught.value))
    assert "b.yaml: task 'b': instruction: is required" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("t.yaml", "id: a\ninstruction: 'open\n", ":3:1: not YAML:"),
        ("t.yaml", "id: a\nid: b\n", ":2:1: not YAML: the key 'id' is given twice"),
        ("t.yaml", "a: 1\n---\nb: 2\n", "not YAML: but found another document"),
        ("t.json", '{\n  "id": "a",\n}', ":3:1: not JSON:"),
        ("t.json", '{"id": "a", "id": "b"}', "the key 'id' is given twice"),
        ("t.json", '{"samples": NaN}', "NaN is not a JSON number"),
        ("t.jsonl", '{"id": "a"}\n{"id": \n', ":2:"),
        ("t.yaml", "", "the file is empty"),
        ("t.yaml", "just text", "must be a task, a list of tasks"),
        ("t.yaml", "tasks: []", "tasks: must be a list of at least one task"),
        ("t.yaml", "defaults: {samples: 2}", "tasks: must be a list of at least one task"),
        ("t.yaml", "tasks: [{id: a}]\nextra: 1", "unknown key 'extra'"),
        ("t.yaml", "defaults: {smples: 2}\ntasks: [{id: a}]", "defaults.smples: unknown key"),
        ("t.yaml", "defaults: {id: x}\ntasks: [{id: a}]", "defaults.id: every task must have its own id"),
        ("t.yaml", "defaults: [1]\ntasks: [{id: a}]", "defaults: must be a mapping"),
        ("t.toml", "id = 1", "its name must end in .yaml"),
        ("t.yaml", "!!python/object/apply:os.system ['true']", "not YAML: could not determine a constructor"),
        ("t.json", "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_malformed_file_says_where(tmp_path: Path, name: str, text: str, where: str) -> None:
    said = problem(tmp_path / name, text)
    assert str(tmp_path / name) in said
    assert where in said


def test_duplicate_ids_are_named_with_both_places(tmp_path: Path) -> None:
    assert "task 'a': id: already used in" in problem(tmp_path / "t.json", [TASK, TASK])
    (tmp_path / "u.json").write_text(json.dumps({**TASK, "id": "b"}))
    (tmp_path / "v.json").write_text(json.dumps({**TASK, "id": "b"}))
    with pytest.raises(InvalidInput, match=r"v\.json: task 'b': id: already used in .*u\.json"):
        load_tasks(tmp_path / "u.json", tmp_path / "v.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"path": "../outside.txt"}, "is outside the task file's directory"),
        ({"path": "/etc/hostname"}, "is outside the task file's directory"),
        ({"path": "link.txt"}, "is outside the task file's directory"),
        ({"path": "absent.txt"}, "cannot be read: No such file or directory"),
        ({"path": "."}, "cannot be read: Is a directory"),
        ({"path": "nul\0.txt"}, "cannot be read"),
        ({"path": 3}, "files.f.path: must be a string"),
        ({"path": "t.json", "text": "x"}, "must have exactly one of"),
        ({}, "a file needs exactly one of 'text' and 'base64'"),
        ({"base64": "!"}, "'base64' does not decode"),
    ],
)
def test_a_bad_file_content_is_named(tmp_path: Path, content: dict[str, object], said: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "outside.txt").write_text("secret")
    (inner / "link.txt").symlink_to(tmp_path / "outside.txt")
    message = problem(inner / "t.json", {**TASK, "files": {"f": content}})
    assert "task 'a': files.f" in message
    assert said in message
    assert "secret" not in message


def test_an_empty_directory_and_an_absent_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no task files in this directory"):
        load_tasks(tmp_path)
    with pytest.raises(InvalidInput, match=r"absent\.yaml: cannot be read: No such file"):
        load_tasks(tmp_path / "absent.yaml")


def test_options_of_a_known_component_are_checked(tmp_path: Path) -> None:
    said = problem(
        tmp_path / "t.json", {**TASK, "evaluator": {"name": "command", "options": {"comand": "x"}}}
    )
    assert "task 'a': evaluator.options.command: is required" in said
    assert "evaluator.options.comand: " in said
    strategy = {"name": "calls", "options": {"cals": [1]}}
    said = problem(tmp_path / "t.json", {**TASK, "branching": {"at": strategy}})
    assert "task 'a': branching.at.options.calls: is required" in said


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "options", "files", "path", "text", "a.txt", "tasks", "defaults", "id"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
FIELDS = ["id", "instruction", "harness", "evaluator", "files", "budgets", "metadata", "tasks", "defaults"]


@given(st.dictionaries(st.sampled_from(FIELDS), values) | st.lists(values))
def test_any_document_is_loaded_or_refused_as_invalid_input(document: object) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "t.json"
        path.write_text(json.dumps(document))
        with suppress(InvalidInput):
            load_tasks(path)


def test_a_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    assert "instruction" in problem(tmp_path / "t.json", {**TASK, "instruction": "\ud800"})


def test_a_document_that_contains_itself_is_refused(tmp_path: Path) -> None:
    text = "id: a\ninstruction: x\nharness: h\nevaluator: e\nmetadata: &m {inner: *m}\n"
    assert "metadata" in problem(tmp_path / "t.yaml", text)


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused_as_invalid_input(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        with suppress(InvalidInput):
            parse(text, "file")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tools": {"w": {}}}, "tools.w: a tool server needs exactly one of 'command' and 'url'"),
        ({"tools": {"w": {"command": "a", "url": "http://b"}}}, "exactly one of 'command' and 'url'"),
        ({"tools": {"w": {"command": "a", "headers": {"B": "c"}}}}, "'headers' need a 'url'"),
        ({"tools": {"w": {"url": "http://a", "args": ["b"]}}}, "'args' and 'env' need a 'command'"),
        ({"tools": {"w": {"url": "a.example"}}}, "tools.w.url: must be a URL that begins with http"),
        ({"tools": {"w": {"url": "http://a", "headers": {"B": "$C"}}}}, "without '$', '{' and '!'"),
        ({"tools": {"w": {"url": "http://a/${C}"}}}, "without '$', '{' and '!'"),
        ({"tools": {"my_words": {"command": "a"}}}, "tools.my_words"),
        (
            {"harness": "mini_swe_agent", "tools": {"w": {"command": "a"}}},
            "tools: harness 'mini_swe_agent' takes no tools besides its own",
        ),
        (
            {"tools": {"w": {"url": "https://a.example/mcp"}}},
            "tools.w.url: sandboxes of this task do not reach a.example:443 (name it in runtime.",
        ),
        ({"tools": {"w": {"url": "http://a.example:99999"}}}, "tools.w.url: Port out of range"),
    ],
)
def test_tools_that_cannot_be_had_are_explained(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    task = {**TASK, "harness": "pi", "evaluator": "session_completed", **changes}
    assert why in problem(tmp_path / "t.json", task)


@pytest.mark.parametrize(
    "runtime",
    ["process", {"name": "bubblewrap", "options": {"network": {"allow": ["*.example:443"]}}}],
    ids=["open", "listed"],
)
def test_tools_that_a_sandbox_reaches_are_taken(tmp_path: Path, runtime: object) -> None:
    tools = {"w": {"url": "https://a.example/mcp"}}
    task = {**TASK, "harness": "pi", "evaluator": "session_completed", "runtime": runtime, "tools": tools}
    (tmp_path / "t.json").write_text(json.dumps(task))
    assert load_tasks(tmp_path / "t.json")
