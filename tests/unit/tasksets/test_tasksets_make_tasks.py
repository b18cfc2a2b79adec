"""A description and its rows become the tasks it says; a bad row is named, and the others are there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from polar.config import plugins
from polar.errors import InvalidInput
from polar.tasksets.files import load_tasks, read_tasks
from polar.tasksets.rows import BadRow, Row, RowSource

ROOT = Path(__file__).parents[3]
DEFAULTS = {"harness": "h", "evaluator": "e", "samples": 2}
ROWS: list[dict[str, Any]] = [
    {"uid": f"q{n}", "question": f"What is {n} + {n}?", "answer": 2 * n, "level": n % 3} for n in range(9)
]
TEMPLATE = {
    "id": "{{ uid }}",
    "instruction": "{{ question }}\nAnswer with a number.\n",
    "metadata": {"answer": "{{ answer }}", "text": "{{ answer }} is right"},
    "files": {"{{ uid }}.txt": {"text": "{{ question }}"}},
}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def described(directory: Path, **description: Any) -> Path:
    path = directory / "taskset.yaml"
    path.write_text(yaml.safe_dump({"defaults": DEFAULTS, **description}, sort_keys=False))
    return path


def test_templates_make_a_task_of_every_row(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)
    tasks = load_tasks(described(tmp_path, source="rows.jsonl", template=TEMPLATE))
    assert [task.id for task in tasks] == [f"q{n}" for n in range(9)]
    assert tasks[3].instruction == "What is 3 + 3?\nAnswer with a number.\n"
    assert tasks[3].metadata == {"answer": 6, "text": "6 is right"}
    assert tasks[3].files["q3.txt"].text == "What is 3 + 3?"
    assert (tasks[3].samples, tasks[3].harness.name) == (2, "h")


def test_a_directory_with_a_description_is_that_taskset(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)
    described(tmp_path, source="rows.jsonl", template=TEMPLATE)
    assert len(load_tasks(tmp_path)) == 9


def test_columns_fill_fields_and_rename_what_templates_read(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)
    columns = {"instruction": "question", "id": "uid", "goal": "answer"}
    path = described(
        tmp_path, source="rows.jsonl", columns=columns, template={"metadata": {"g": "{{ goal }}"}}
    )
    tasks = load_tasks(path)
    assert (tasks[2].id, tasks[2].instruction, tasks[2].metadata) == ("q2", "What is 2 + 2?", {"g": 4})


def test_rows_without_an_id_get_their_number(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)
    path = described(tmp_path, source="rows.jsonl", columns={"instruction": "question"}, filter="level == 2")
    assert [task.id for task in load_tasks(path)] == ["row-3", "row-6", "row-9"]


def saved(tmp_path: Path, kind: str) -> str:
    match kind:
        case "jsonl":
            return jsonl(tmp_path / "rows.jsonl", ROWS).name
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
            return "rows.parquet"
        case "parquet directory":
            (tmp_path / "data").mkdir()
            pq.write_table(pa.Table.from_pylist(ROWS[:5]), tmp_path / "data" / "train-00000-of-00002.parquet")
            pq.write_table(pa.Table.from_pylist(ROWS[5:]), tmp_path / "data" / "train-00001-of-00002.parquet")
            pq.write_table(pa.Table.from_pylist(ROWS[:1]), tmp_path / "data" / "test-00000-of-00001.parquet")
            return "data"
        case "dataset":
            datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=2)
            return "saved"
        case "dataset with splits":
            train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])
            datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "splits")
            return "splits"
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("jsonl", None),
        ("parquet", None),
        ("parquet directory", "train"),
        ("dataset", None),
        ("dataset with splits", "train"),
    ],
)
def test_every_kind_of_source_gives_the_same_tasks(tmp_path: Path, kind: str, split: str | None) -> None:
    jsonl(tmp_path / "plain.jsonl", ROWS)
    expected = load_tasks(described(tmp_path, source="plain.jsonl", template=TEMPLATE))
    path = described(tmp_path, source=saved(tmp_path, kind), template=TEMPLATE, split=split)
    assert load_tasks(path) == expected


def test_tables_of_whole_tasks_need_no_description(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "instruction": "x", "harness": "h", "evaluator": "e", "files": {"a.py": {"text": "1"}}},
        {"id": "b", "instruction": "y", "harness": "h", "evaluator": "e", "files": {"b.py": {"text": "2"}}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    a, b = load_tasks(tmp_path / "tasks.parquet")
    assert (set(a.files), set(b.files)) == ({"a.py"}, {"b.py"})


def test_filter_shuffle_limit_and_repeat(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)

    def ids(**more: Any) -> list[str]:
        return [
            task.id
            for task in load_tasks(described(tmp_path, source="rows.jsonl", template=TEMPLATE, **more))
        ]

    assert ids(filter="level > 0 and answer < 10") == ["q1", "q2", "q4"]
    shuffled = ids(shuffle=7)
    assert sorted(shuffled) == ids()
    assert shuffled != ids()
    assert ids(shuffle=7) == shuffled
    assert ids(shuffle=8) != shuffled
    assert ids(shuffle=7, limit=3) == shuffled[:3]
    assert ids(limit=2, repeat=2) == ["q0-1", "q0-2", "q1-1", "q1-2"]


def test_a_bad_row_is_named_by_line_and_field_and_the_rest_is_there(tmp_path: Path) -> None:
    lines = [
        json.dumps(ROWS[0]),
        '{"uid": "broken", ',
        json.dumps({"uid": "q2", "answer": 1, "level": 0}),
        "[1, 2]",
        json.dumps({**ROWS[4], "uid": "not an id!"}),
        json.dumps({**ROWS[5], "level": "high"}),
        '{"uid": "x", "uid": "y"}',
        json.dumps(ROWS[0]),
        json.dumps(ROWS[6]),
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    loaded = read_tasks(described(tmp_path, source="rows.jsonl", template=TEMPLATE, filter="level < 5"))
    file = tmp_path / "rows.jsonl"
    assert [task.id for task in loaded.tasks] == ["q0", "q6"]
    assert [problem.split(" '^")[0] for problem in loaded.problems][:6] == [
        f"{file}:2:18: not JSON: Expecting property name enclosed in double quotes",
        f"{file}:3: instruction: 'question' is undefined; known: row, number, uid, answer, level",
        f"{file}:4: must be a JSON object, not a list",
        f"{file}:5: task 'not an id!': id: String should match pattern",
        f"{file}:6: filter: '<' not supported between instances of 'str' and 'int'",
        f"{file}:7: not JSON: the key 'uid' is given twice",
    ]
    assert loaded.problems[6] == f"{file}:8: task 'q0': id: already used in {file}:1"
    with pytest.raises(InvalidInput, match="7 problems"):
        loaded.all_or_nothing()


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ({"source": "absent.jsonl"}, "cannot be read: No such file"),
        ({"source": "rows.jsonl", "smaples": 3}, "smaples: unknown key"),
        ({"source": "rows.jsonl", "defaults": {"smaples": 3}}, "defaults.smaples: unknown key"),
        ({"source": "rows.jsonl", "template": {"instructions": "x"}}, "template.instructions: unknown key"),
        ({"source": "rows.jsonl", "template": {"instruction": "{{ x"}}, "template.instruction: line 1:"),
        ({"source": "rows.jsonl", "filter": "level >"}, "filter: unexpected"),
        ({"source": "rows.jsonl", "filter": "level ="}, "filter: chunk after expression"),
        ({"source": "rows.jsonl", "split": "train"}, "split: "),
        ({"source": "rows.jsonl", "limit": 0}, "limit: "),
        ({"source": "rows.jsonl", "format": "carrier_pigeon"}, "unknown name 'carrier_pigeon'"),
        ({"source": "rows.jsonl", "options": {"x": 1}}, "taskset.options.x: unknown key"),
        ({"format": "jsonl"}, "source: is required"),
        ({"source": "rows.txt"}, "has an unknown format"),
        ({"source": "rows.parquet"}, "cannot be read"),
    ],
)
def test_a_wrong_description_is_explained(tmp_path: Path, description: dict[str, Any], said: str) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "rows.parquet").write_text("not parquet")
    (problem,) = read_tasks(described(tmp_path, **description)).problems
    assert said in problem


@pytest.mark.parametrize(
    "text",
    [
        "{{ question.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for n in range(100000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ row.absent.deeper }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_reaches_nothing_but_its_row(tmp_path: Path, text: str) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS[:1])
    loaded = read_tasks(described(tmp_path, source="rows.jsonl", template={"instruction": text}))
    assert loaded.tasks == ()
    assert "instruction: " in loaded.problems[0]


def test_what_stands_in_a_row_is_never_a_template(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", [{**ROWS[0], "question": "{{ answer }} {% raise %}"}])
    (task,) = load_tasks(described(tmp_path, source="rows.jsonl", template={"instruction": "{{ question }}"}))
    assert task.instruction == "{{ answer }} {% raise %}"


SWE = ROOT / "examples" / "swe-mini" / "swe-mini.jsonl"


def test_rows_of_swe_bench_are_tasks_without_their_gold_patch() -> None:
    loaded = read_tasks(SWE, over={"harness": {"name": "pi"}})
    assert loaded.problems == ()
    rows = [json.loads(line) for line in SWE.read_text().splitlines()]
    assert [task.id for task in loaded.tasks] == [row["instance_id"] for row in rows]
    for task, row in zip(loaded.tasks, rows, strict=True):
        assert task.instruction == row["problem_statement"]
        assert set(task.files) == set(row["files"])
        assert task.evaluator.name == "swebench"
        graded: Any = task.evaluator.options["row"]
        assert graded["FAIL_TO_PASS"] == json.loads(row["FAIL_TO_PASS"])
        assert row["patch"] not in task.model_dump_json()
        assert "patch" not in graded


def test_swe_rows_survive_a_table_and_take_templates(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in SWE.read_text().splitlines()]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert read_tasks(tmp_path / "saved", over={"harness": {"name": "pi"}}) == read_tasks(
        SWE, over={"harness": {"name": "pi"}}
    )
    image = {"runtime": {"name": "docker", "options": {"image": "swe.{{ instance_id | lower }}"}}}
    path = tmp_path / "taskset.yaml"
    path.write_text(yaml.safe_dump({"source": "saved", "template": image, "defaults": {"harness": "pi"}}))
    task = load_tasks(path)[0]
    assert task.runtime.options == {"image": f"swe.{rows[0]['instance_id']}"}
    assert task.evaluator.name == "swebench"


def test_a_bad_swe_row_names_its_column(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in SWE.read_text().splitlines()[:3]]
    rows[0]["FAIL_TO_PASS"] = "not json"
    rows[1]["test_patch"] = "not a diff"
    jsonl(tmp_path / "rows.jsonl", rows)
    loaded = read_tasks(tmp_path / "rows.jsonl", over={"harness": {"name": "pi"}})
    assert len(loaded.tasks) == 1
    assert [problem.split(": ", 1)[1] for problem in loaded.problems] == [
        "FAIL_TO_PASS: must be a list of test ids, as a list or as JSON text",
        "test_patch: must be a unified diff",
    ]


def test_a_directory_of_harbor_tasks_is_a_taskset(tmp_path: Path) -> None:
    harbor = ROOT / "examples" / "swe-mini" / "harbor"
    loaded = read_tasks(harbor, over={"harness": {"name": "pi"}})
    assert loaded.problems == ()
    assert len(loaded.tasks) == len(list(harbor.iterdir()))
    (one,) = read_tasks(sorted(harbor.iterdir())[0], over={"harness": {"name": "pi"}}).tasks
    assert one == loaded.tasks[0]
    assert one.evaluator.name == "harbor"


def test_a_broken_harbor_task_does_not_stop_the_others(tmp_path: Path) -> None:
    for name, toml in (("good", ""), ("bad", "[agent]\ntimeout_sec = -1\n")):
        directory = tmp_path / name
        (directory / "tests").mkdir(parents=True)
        (directory / "environment").mkdir()
        (directory / "task.toml").write_text(toml)
        (directory / "instruction.md").write_text("Do it.")
        (directory / "tests" / "test.sh").write_text("exit 0\n")
        (directory / "environment" / "Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
    loaded = read_tasks(tmp_path, over={"harness": {"name": "pi"}})
    assert [task.id for task in loaded.tasks] == ["good"]
    (problem,) = loaded.problems
    assert problem.startswith(f"{tmp_path / 'bad'}: task.toml: agent.timeout_sec: ")


def test_options_of_the_command_line_lie_over_every_task(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS[:1])
    defaults = {"harness": {"name": "h", "options": {"a": 1}}, "evaluator": "e", "sampling": {"top_p": 0.5}}
    path = described(tmp_path, source="rows.jsonl", template=TEMPLATE, defaults=defaults)
    over = {"harness": {"name": "h"}, "samples": 5, "sampling": {"seed": 3}}
    (task,) = read_tasks(path, over=over).tasks
    assert (task.samples, task.harness.options) == (5, {"a": 1})
    assert (task.sampling.seed, task.sampling.top_p) == (3, 0.5)
    (other,) = read_tasks(path, over={"harness": {"name": "other"}}).tasks
    assert (other.harness.name, other.harness.options) == ("other", {})


class Counting(RowSource):
    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        yield Row("first", {"n": 1})
        yield BadRow("second", "is not there")
        yield Row("third", {"n": 3}, {"id": "made", "instruction": "by the plug-in"})


def test_a_plug_in_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "load", lambda kind, name: Counting)
    path = described(tmp_path, format="counting", template={"metadata": {"n": "{{ n }}"}})
    loaded = read_tasks(path)
    assert [(task.id, task.metadata) for task in loaded.tasks] == [("made", {"n": 3})]
    assert loaded.problems == (
        "first: task 'row-1': instruction: is required",
        "second: is not there",
    )


def test_rows_are_read_one_at_a_time(tmp_path: Path) -> None:
    """A row that cannot be read does not matter to who wants only those before it."""
    jsonl(tmp_path / "rows.jsonl", ROWS)
    with (tmp_path / "rows.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    assert len(load_tasks(described(tmp_path, source="rows.jsonl", template=TEMPLATE, limit=4))) == 4
    (problem,) = read_tasks(described(tmp_path, source="rows.jsonl", template=TEMPLATE)).problems
    assert problem.endswith("rows.jsonl:10: not UTF-8 text (byte 0)")
