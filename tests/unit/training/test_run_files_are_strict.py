"""A run's YAML file is one run: what it does not understand it refuses, and paths are found from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polar.config.settings import DEFAULT_MODEL, EngineSettings, load_settings
from polar.errors import InvalidInput
from polar.tasksets.files import load_tasks
from polar.training.settings import GrpoSettings, RunSettings, SftSettings, load_run

EXAMPLES = Path(__file__).parents[3] / "examples" / "grpo-pi"
GOOD = "out: runs/a\nsteps: 3\nrecordings: there\n"


def written(directory: Path, text: str) -> Path:
    path = directory / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "stepz: 3\n", "stepz: unknown key"),
        (GOOD + "objective: {clip: 0.2}\n", "objective.clip: unknown key"),
        (GOOD + "optimizer: {lr: -1}\n", "optimizer.lr"),
        (GOOD + "objective: {normalise: false}\n", "'advantage: mean' divides by nothing"),
        ("out: a\nsteps: 3\n", "exactly one of 'rollouts' and 'recordings'"),
        (GOOD + "rollouts: {tasks: [a]}\n", "exactly one of 'rollouts' and 'recordings'"),
        ("- 1\n", "must be a mapping"),
        ("a: b: c", "run.yaml:1:5: not YAML"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(said)):
        load_run(written(tmp_path, text), GrpoSettings)


def test_paths_are_relative_to_the_file_and_out_is_not(tmp_path: Path) -> None:
    run = load_run(written(tmp_path, GOOD), GrpoSettings)
    assert (run.recordings, run.out) == (tmp_path / "there", Path("runs/a"))
    sft = load_run(written(tmp_path, "out: o\nsteps: 1\ndata: [d, /e]\nmodel: {start: s}\n"), SftSettings)
    assert sft.data == (tmp_path / "d", Path("/e"))
    assert sft.model.start == tmp_path / "s"


def test_weights_are_left_beside_the_file(tmp_path: Path) -> None:
    text = "out: o\nsteps: 1\nrollouts: {tasks: [t], weights: %s}\n"
    found = [load_run(written(tmp_path, text % path), GrpoSettings).rollouts for path in ("w", "/shared")]
    assert [rollouts.weights for rollouts in found if rollouts] == [tmp_path / "w", Path("/shared")]


@pytest.mark.parametrize("name", ["tiny", "nested/tiny", "../tiny"])
def test_a_model_beside_the_file_is_found_from_it(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "runs"
    (directory / name).mkdir(parents=True)
    run = load_run(written(directory, f"{GOOD}model: {{name: {name}}}\n"), GrpoSettings)
    assert Path(run.model.name).samefile(directory / name)


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "Qwen/Qwen3-0.6B", "/models/tiny", "absent"])
def test_the_name_of_a_model_that_is_not_beside_the_file_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / DEFAULT_MODEL).mkdir()
    run = load_run(written(tmp_path, f"{GOOD}model: {{name: {name}}}\n"), GrpoSettings)
    assert run.model.name == name


def test_synchronous_runs_are_never_ahead(tmp_path: Path) -> None:
    text = "out: o\nsteps: 1\nrollouts: {tasks: [t], synchronous: %s}\nobjective: {max_staleness: 3}\n"
    aheads = [load_run(written(tmp_path, text % flag), GrpoSettings).ahead for flag in ("true", "false")]
    assert aheads == [0, 3]


@pytest.mark.parametrize(
    ("name", "kind"), [("tiny.yaml", GrpoSettings), ("gpu.yaml", GrpoSettings), ("sft.yaml", SftSettings)]
)
def test_the_examples_are_sound(name: str, kind: type[RunSettings]) -> None:
    run = load_run(EXAMPLES / name, kind)
    if isinstance(run, GrpoSettings) and run.rollouts is not None:
        assert len(load_tasks(*run.rollouts.tasks)) >= run.groups


def engine_of(name: str) -> EngineSettings:
    run = load_run(EXAMPLES / name, GrpoSettings)
    assert run.rollouts is not None
    return load_settings(run.rollouts.config).engine


def test_the_learning_example_samples_with_vllm_where_there_is_a_gpu_and_without_one_too() -> None:
    assert engine_of("gpu.yaml").kind == "vllm"
    assert engine_of("gpu.yaml").gpu_memory == 0.3  # the trainer needs the rest
    assert engine_of("tiny.yaml").is_embedded
