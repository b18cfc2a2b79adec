"""`examples/harnesses/learn.py`: every arm runs commands whose files Polar reads as they are meant."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.config.settings import load_settings
from polar.models.chat import FinishReason, Message, Role, ToolCall
from polar.models.completion import Completion
from polar.models.session import SessionResult, SessionStatus, TrajectoryStats, Verdict
from polar.models.trace import Trajectory
from polar.recordings.recording import Recording
from polar.tasksets.files import read_tasks
from polar.training.settings import GrpoSettings, SftSettings, load_run
from tests.captures import grow

EXAMPLES = Path(__file__).parents[3] / "examples"
USUAL = EXAMPLES / "public-tasks" / "humaneval.yaml"
WORDINGS = EXAMPLES / "harnesses" / "wordings"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / "harnesses" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch) -> Any:
    return script("learn", monkeypatch)


def experiment_in(directory: Path, learn: Any, tasks: Path = USUAL, **changes: Any) -> Any:
    common: dict[str, Any] = {"samples": 2, "tries": 3, "limit": None, "seed": 0, "seconds": None, "steps": 3}
    common |= {"start": "rejection-1", "demonstrations": None}
    return learn.Experiment(
        out=directory / "out",
        tasks=tasks,
        model="model",
        engine_url="http://127.0.0.1:8000",
        tool_form="fenced",
        runtime="bubblewrap",
        concurrency=8,
        nodes=2,
        **{"harnesses": ("pi",), "unseen": ()} | common | changes,
    )


def make_checkpoint(directory: Path, run: str, step: int = 1) -> Path:
    weights = directory / "out" / "pi" / run / "checkpoints" / f"step-{step:06d}" / "weights"
    weights.mkdir(parents=True)
    return weights


@pytest.mark.parametrize(
    ("arm", "name", "rewards", "builder"),
    [
        ("grpo", "grpo", "own", "prefix_merging"),
        ("shuffled", "shuffled", "shuffled", "prefix_merging"),
        ("per_request", "per-request", "own", "per_request"),
        ("branched", "branched", "own", "prefix_merging"),
    ],
)
def test_each_arm_of_grpo_differs_in_what_its_name_says(
    learn: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arm: str,
    name: str,
    rewards: str,
    builder: str,
) -> None:
    asked: list[list[str]] = []

    def polar(_experiment: object, *arguments: object) -> None:
        asked.append([str(one) for one in arguments])

    monkeypatch.setattr(learn.Experiment, "polar", polar)
    experiment = experiment_in(tmp_path, learn)
    for trained in ("rejection-1/sft", f"{name}/run"):
        make_checkpoint(tmp_path, trained)
    getattr(experiment, arm)()

    (train, file, *_), (evaluate, *options) = asked
    assert (train, evaluate) == ("train", "eval")
    run = load_run(Path(file), GrpoSettings)
    assert run.rollouts is not None
    assert run.objective.rewards == rewards
    assert str(run.model.start).endswith("rejection-1/sft/checkpoints/step-000001/weights")
    assert f"{name}/run/checkpoints/step-000001/weights" in options[options.index("--weights") + 1]
    tasks = read_tasks(*run.rollouts.tasks).tasks
    held_out = read_tasks(Path(options[options.index("-t") + 1])).tasks
    assert {task.builder.name for task in tasks} == {builder}
    assert {task.branching is not None for task in tasks} == {arm == "branched"}
    assert (run.objective.advantage == "tree") == (arm == "branched")
    assert {task.sampling.temperature for task in (*tasks, *held_out)} == {run.objective.temperature}
    assert not {task.id for task in tasks} & {task.id for task in held_out}
    assert run.rollouts.config is not None
    system = load_settings(run.rollouts.config)
    assert run.model.lora is not None
    assert system.engine.lora_rank == run.model.lora.rank


def test_a_pilot_tries_training_tasks_and_a_run_may_begin_with_the_published_weights(
    learn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def polar(_experiment: object, *arguments: object) -> None:
        asked.append([str(one) for one in arguments])

    monkeypatch.setattr(learn.Experiment, "polar", polar)
    experiment = experiment_in(tmp_path, learn, start="published", limit=5)
    make_checkpoint(tmp_path, "grpo-from-published/run")
    experiment.pilot()
    experiment.grpo()

    pilot, train, _ = asked
    (tried,) = after("-t", pilot)
    assert {task.metadata["split"] for task in read_tasks(Path(tried)).tasks} == {"train"}
    assert "--weights" not in pilot
    assert load_run(Path(train[1]), GrpoSettings).model.start is None


def test_rejection_sampling_goes_on_from_demonstrations_where_grpo_does(
    learn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def polar(experiment: object, *arguments: object) -> None:
        asked.append([str(one) for one in arguments])
        if arguments[:2] == ("train", "sft"):
            make_checkpoint(tmp_path, "rejection-from-taught-1/sft")

    monkeypatch.setattr(learn.Experiment, "polar", polar)
    monkeypatch.setattr(learn, "write_chosen", lambda data, into: 8)
    taught = make_checkpoint(tmp_path, "taught/sft")
    experiment_in(tmp_path, learn, start="taught").rejection()

    generate, train, evaluate = asked
    assert after("--weights", generate) == [str(taught)]
    assert load_run(Path(train[2]), SftSettings).model.start == taught
    assert "rejection-from-taught-1" in after("--weights", evaluate)[0]


@pytest.mark.parametrize(
    "file", sorted((EXAMPLES / "harnesses" / "wordings").iterdir()), ids=lambda f: f.stem
)
def test_every_wording_is_of_the_same_tasks(learn: Any, tmp_path: Path, file: Path) -> None:
    experiment = experiment_in(tmp_path, learn, file, harnesses=("pi", "codex"))
    tasks = read_tasks(*experiment.tasks_to_learn()).tasks
    usual = [task.id for task in read_tasks(USUAL).tasks]
    assert {task.id for task in tasks} == {f"{id}-{harness}" for id in usual for harness in ("pi", "codex")}
    named, other = (str(read_tasks(path).tasks[0].instruction) for path in (USUAL, file))
    assert (named == other) == (file.stem == "named")
    assert "{{" not in other


def test_groups_of_several_harnesses_are_apart_and_unseen_ones_are_only_tested(
    learn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def polar(_experiment: object, *arguments: object) -> None:
        asked.append([str(one) for one in arguments])

    monkeypatch.setattr(learn.Experiment, "polar", polar)
    experiment = experiment_in(tmp_path, learn, harnesses=("pi", "codex"), unseen=("qwen_code",))
    experiment.generate(experiment.directory("rejection-1"), None)
    experiment.before()

    (generate, *generated), (evaluate, *evaluated) = asked
    assert (generate, evaluate) == ("generate", "eval")
    tasks = read_tasks(*(Path(word) for word in after("-t", generated))).tasks
    assert len({task.id for task in tasks}) == len(tasks) == 2 * 123
    assert {task.harness.name for task in tasks} == {"pi", "codex"}
    assert after("--harness", evaluated) == ["pi", "codex", "qwen_code"]


def after(option: str, words: list[str]) -> list[str]:
    return [value for word, value in pairwise(words) if word == option]


def test_a_round_that_solved_nothing_says_what_to_do(learn: Any, tmp_path: Path) -> None:
    from polar.tasksets.expressions import parse_acceptance
    from polar.tasksets.sft import write_dataset

    data = tmp_path / "data"
    data.mkdir()
    write_dataset((), data, parse_acceptance("reward >= 1"))
    experiment = object.__new__(learn.Experiment)
    with pytest.raises(SystemExit, match="increase --tries"):
        experiment.fine_tune(tmp_path, [data])


def test_a_task_that_is_always_solved_weighs_no_more_than_others(learn: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rounds = {"old": ["easy"] * 9 + ["hard"], "new": ["easy"] * 2}
    for name, tasks in rounds.items():
        (tmp_path / name).mkdir()
        table = pa.table({"task": tasks, "session": [f"{name}-{n}" for n in range(len(tasks))]})
        pq.write_table(table, tmp_path / name / "tokens.parquet")
    file = tmp_path / "tokens.parquet"
    assert learn.write_chosen([tmp_path / "old", tmp_path / "new"], file) == 5
    assert pq.read_table(file).column("session").to_pylist() == ["new-0", "new-1", "old-0", "old-1", "old-9"]


def test_sessions_of_many_conversations_count_once(learn: Any, tmp_path: Path) -> None:
    """The ids of sessions follow from their tasks: those of two rounds are the same."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rounds = {"old": [0, 0, 1, 2, 3, 4], "new": [0, 0, 1]}
    for name, sessions in rounds.items():
        (tmp_path / name).mkdir()
        table = pa.table({"task": ["t"] * len(sessions), "session": sessions, "of": [name] * len(sessions)})
        pq.write_table(table, tmp_path / name / "tokens.parquet")
    file = tmp_path / "tokens.parquet"
    assert learn.write_chosen([tmp_path / "old", tmp_path / "new"], file) == 6
    kept = pq.read_table(file)
    assert list(zip(kept["of"].to_pylist(), kept["session"].to_pylist(), strict=True)) == [
        *(("new", session) for session in (0, 0, 1)),
        *(("old", session) for session in (0, 0, 1)),
    ]


def test_an_arm_that_was_stopped_while_it_was_measured_trains_no_further(
    learn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of so many seconds goes on for as long each time that it is asked, and ends elsewhere."""
    make_checkpoint(tmp_path, "rejection-1/sft")
    asked: list[list[str]] = []

    def polar(_experiment: object, *arguments: object) -> None:
        asked.append([str(one) for one in arguments])
        if arguments[0] == "train":
            make_checkpoint(tmp_path, "grpo/run", len(asked))
            return
        out = Path(asked[-1][asked[-1].index("--out") + 1])
        out.mkdir(exist_ok=True)
        if len(asked) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(learn.Experiment, "polar", polar)
    experiment = experiment_in(tmp_path, learn, seconds=5.0)
    with pytest.raises(KeyboardInterrupt):
        experiment.grpo()
    experiment.grpo()
    train, measured, again = asked
    assert train[0] == "train"
    assert measured == again


def test_another_seed_draws_no_sample_of_the_first_again(
    learn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample k of a task is drawn with the task's seed + k, which follows from that of the command."""
    drawn: dict[str, list[int]] = {"generate": [], "eval": []}
    fine_tuned = []

    def polar(experiment: Any, command: str, *arguments: object) -> None:
        said = [str(one) for one in arguments]
        if command in drawn:
            samples, seed = (int(said[said.index(name) + 1]) for name in ("--samples", "--seed"))
            for task in read_tasks(*map(Path, after("-t", said)), seed=seed).tasks:
                assert task.sampling.seed is not None
                drawn[command] += range(task.sampling.seed, task.sampling.seed + samples)
        else:
            fine_tuned.append(load_run(Path(said[1]), SftSettings).seed)
            make_checkpoint(tmp_path, f"{Path(said[1]).parent.name}/sft")

    monkeypatch.setattr(learn.Experiment, "polar", polar)
    monkeypatch.setattr(learn, "write_chosen", lambda data, into: 1)
    for seed in range(3):
        experiment_in(tmp_path, learn, seed=seed).rejection()
    assert [len(set(drawn[command])) for command in ("generate", "eval")] == [9 * 123, 6 * 41]
    assert fine_tuned == [0, 1, 2]


def test_the_table_is_made_of_few_samples_too(tmp_path: Path) -> None:
    """As of the small run that the README names."""
    published = Path(__file__).parents[3] / "docs" / "results" / "harnesses" / "pi"
    for arm in ("before", "grpo"):
        report = json.loads((published / arm / "report.json").read_text())
        report["ks"] = [1, 2]
        del report["cells"][0]["metrics"]["pass@4"], report["cells"][0]["metrics"]["pass@8"]
        (tmp_path / "pi" / arm / "eval").mkdir(parents=True)
        (tmp_path / "pi" / arm / "eval" / "report.json").write_text(json.dumps(report))
    command = [sys.executable, str(EXAMPLES / "harnesses" / "table.py")]
    small, whole = (
        subprocess.run([*command, str(root)], capture_output=True, text=True, check=True).stdout
        for root in (tmp_path, published.parent)
    )
    assert "| pass@1 | pass@2 |" in small.splitlines()[0]
    assert "| pass@1 | pass@8 |" in whole.splitlines()[0]
    assert "| pi | grpo | pi | 14.0 %" in small


@pytest.mark.parametrize(
    ("calls", "has_read"),
    [
        ((), False),
        ((("read", "solution.py"), ("write", "solution.py")), True),
        ((("write", "solution.py"), ("read", "solution.py")), False),
        ((("bash", "cat solution.py"), ("edit", "solution.py")), True),
        ((("read", "other.py"), ("bash", "python3 solution.py")), False),
    ],
)
def test_to_read_is_to_look_at_the_file_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch, calls: tuple[tuple[str, str], ...], has_read: bool
) -> None:
    habits = script("habits", monkeypatch)
    nothing = np.empty(0, np.int32)
    numbers = (nothing, nothing, nothing.astype(np.float32), nothing, ())
    said = [
        Completion(
            f"c{at}",
            at,
            *numbers,
            Message(Role.ASSISTANT, "", tool_calls=(ToolCall("c", name, given),)),
            FinishReason.TOOL_CALLS,
        )
        for at, (name, given) in enumerate(calls)
    ]
    result = SessionResult(
        session_id="s",
        task_id="t",
        sample=0,
        attempt=1,
        status=SessionStatus.COMPLETED,
        verdict=Verdict(reward=1.0),
        stats=TrajectoryStats(),
        has_recording=True,
    )
    found = habits.habits(Recording(grow(said), Trajectory((), (), result.stats), result))
    assert (found["read"], found["tools"], found["passed"]) == (has_read, [name for name, _ in calls], True)
