"""A plan is every combination under ids of its own, tied to its directory; a journal survives a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polar.errors import InvalidInput
from polar.evals.plan import (
    Conditions,
    HarnessChoice,
    Plan,
    bind_directory,
    check_harnesses,
    make_plan,
    name_tasksets,
    parse_harness,
    run_in,
)
from polar.evals.run import JOURNAL_FILE, Journal
from polar.models.component import Component
from tests.fakes.reports import attempt


def taskset(path: Path, *ids: str, **defaults: Any) -> Path:
    document = {
        "defaults": {
            "instruction": "do it",
            "harness": {"name": "shell", "options": {"command": "true", "env": {"A": "1"}}},
            "evaluator": {"name": "command", "options": {"command": "true"}},
            "runtime": "process",
            "early_stop": 1,
            **defaults,
        },
        "tasks": [{"id": id} for id in ids],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return path


def planned(path: Path, *harnesses: str, run: str = "r", **changes: Any) -> Plan:
    choices = [parse_harness(text) for text in harnesses or ("own",)]
    return make_plan(name_tasksets([path]), choices, [None], Conditions(**{"samples": 2, **changes}), run=run)


def test_samples_alone_are_evaluated(tmp_path: Path) -> None:
    strategy = {"name": "calls", "options": {"calls": [1]}}
    plan = planned(taskset(tmp_path / "one.yaml", "a", branching={"at": strategy}))
    specs = [task.spec for cell in plan.cells for task in cell.tasks]
    assert [(spec.samples, spec.early_stop, spec.branching) for spec in specs] == [(2, None, None)]


def test_every_task_of_every_combination_has_an_id_of_its_own(tmp_path: Path) -> None:
    paths = [taskset(tmp_path / "one.yaml", "a", "b"), taskset(tmp_path / "two.yaml", "a", "x" * 128)]
    choices = [parse_harness("own"), parse_harness("no=shell:{command: 'false'}")]
    plan = make_plan(name_tasksets(paths), choices, ["m", "n"], Conditions(samples=3), run="r")
    ids = [task.spec.id for cell in plan.cells for task in cell.tasks]
    assert len(ids) == len(set(ids)) == 2 * 2 * 2 * 2
    assert all(len(id) <= 128 for id in ids)
    assert plan.sessions == 3 * len(ids)
    assert {task.spec.samples for cell in plan.cells for task in cell.tasks} == {3}
    assert {task.spec.early_stop for cell in plan.cells for task in cell.tasks} == {None}


def test_the_chosen_harness_keeps_the_tasks_own_options_under_its_own(tmp_path: Path) -> None:
    plan = planned(taskset(tmp_path / "t.yaml", "a"), "shell:{command: 'echo'}", seed=5, temperature=0.5)
    spec = plan.cells[0].tasks[0].spec
    assert spec.harness == Component(name="shell", options={"command": "echo", "env": {"A": "1"}})
    assert spec.sampling.temperature == 0.5


def test_no_two_tasks_draw_alike_and_the_same_task_draws_the_same_again(tmp_path: Path) -> None:
    path = taskset(tmp_path / "t.yaml", "a", "b")
    seeds = [
        [task.spec.sampling.seed for task in planned(path, run=run, seed=seed).cells[0].tasks]
        for run, seed in (("one", 5), ("two", 5), ("three", 6))
    ]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 4


def test_what_a_task_asks_is_its_identity_and_not_who_is_asked(tmp_path: Path) -> None:
    path = taskset(tmp_path / "t.yaml", "a")
    one, other = planned(path), planned(path, "shell:{command: x}", samples=9, seed=1)
    changed = planned(taskset(tmp_path / "u.yaml", "a", instruction="do another thing"))
    digests = [plan.cells[0].tasks[0].digest for plan in (one, other, changed)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("pi", HarnessChoice(label="pi", component=Component(name="pi"))),
        ("own", HarnessChoice(label="own")),
        ("quick=pi", HarnessChoice(label="quick", component=Component(name="pi"))),
        (
            "a b=shell:{command: 'x=1; y'}",
            HarnessChoice(label="a b", component=Component(name="shell", options={"command": "x=1; y"})),
        ),
        (
            'shell:{"command": "a:b"}',
            HarnessChoice(label="shell", component=Component(name="shell", options={"command": "a:b"})),
        ),
    ],
)
def test_a_harness_is_read_with_label_and_options(text: str, choice: HarnessChoice) -> None:
    assert parse_harness(text) == choice


@pytest.mark.parametrize("text", ["", "Pi", "pi:", "pi:{", "pi:{a: }}", "pi:[1]", "=pi", "\x00", "\udcff"])
def test_a_malformed_harness_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--harness"):
        parse_harness(text)


def test_an_unknown_harness_is_named_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"unknown name 'emacs' \(known: .*shell"):
        check_harnesses([parse_harness("emacs")])


def test_two_harnesses_of_one_name_need_labels(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="two are called 'shell'"):
        planned(taskset(tmp_path / "t.yaml", "a"), "shell", "shell:{command: x}")


def test_bad_tasks_are_left_out_and_told(tmp_path: Path) -> None:
    path = taskset(tmp_path / "t.yaml", "a", "b")
    document = yaml.safe_load(path.read_text())
    document["tasks"].append({"id": "bad", "files": 7})
    path.write_text(yaml.safe_dump(document))
    plan = planned(path)
    assert [task.id for task in plan.cells[0].tasks] == ["a", "b"]
    assert len(plan.problems) == 1
    assert "'bad'" in plan.problems[0]


@pytest.mark.parametrize("content", ["tasks: []", "[]", ""])
def test_an_empty_taskset_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=r"t\.yaml"):
        planned(path)


def test_tasksets_are_told_apart_by_name(tmp_path: Path) -> None:
    same = [taskset(tmp_path / side / "tasks.yaml", "a") for side in ("left", "right")]
    assert set(name_tasksets(same)) == set(map(str, same))
    assert set(name_tasksets([same[0]])) == {"tasks"}
    with pytest.raises(InvalidInput, match="given twice"):
        name_tasksets([same[0], same[0]])


def test_a_directory_belongs_to_one_plan(tmp_path: Path) -> None:
    path, out = taskset(tmp_path / "t.yaml", "a"), tmp_path / "out"
    assert run_in(out) != run_in(out), "a new one each time"
    bind_directory(planned(path, run="first"), out)
    assert run_in(out) == "first"
    bind_directory(planned(path, run="first", ks=(1, 2), threshold=0.5), out)
    for other in (planned(path, run="first", samples=3), planned(path, "shell:{command: x}", run="first")):
        with pytest.raises(InvalidInput, match="belongs to an evaluation with other"):
            bind_directory(other, out)
    with pytest.raises(InvalidInput, match="not a directory"):
        run_in(path)


def test_a_line_that_a_kill_cut_short_is_forgotten_and_the_rest_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(attempt("a", 1))
    journal.append(attempt("a", 0, None))
    del journal
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes() + b'{"session_id": "b.0", "ta')
    again = Journal(tmp_path)
    assert set(again.attempts) == {("a", 0), ("a", 1)}
    again.append(attempt("b", 0))
    del again
    assert set(Journal(tmp_path).attempts) == {("a", 0), ("a", 1), ("b", 0)}


def test_two_evaluations_cannot_share_a_directory(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(InvalidInput, match="another evaluation is running"):
        Journal(tmp_path)
    assert not journal.attempts


def test_a_line_of_something_else_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_FILE).write_text('{"a": 1}\n')
    with pytest.raises(InvalidInput, match=r"attempts\.jsonl:1"):
        Journal(tmp_path)
