"""A run improves its objective, goes on exactly where it was killed, and stops before it spoils weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from polar.app.own_system import only_writer
from polar.app.weights import Exports
from polar.errors import Conflict
from polar.training.checkpoint import checkpoints, latest
from polar.training.learner import Diverged
from polar.training.loop import CHECKPOINTS
from polar.training.material import Material, PolicyVersions, material
from polar.training.metrics import board
from polar.training.objective import Measured, policy_loss
from polar.training.policy import load_policy
from polar.training.run import assemble, train
from polar.training.settings import BatchSettings, GrpoSettings, ModelSettings, ObjectiveSettings
from tests.fakes.scripted_rollouts import group
from tests.fakes.training_runs import (
    BAD,
    GOOD,
    LOGPROB,
    groups,
    preference,
    quiet,
    same_tensors,
    settings,
    tensors,
)

KILLED_IN_A_STEP = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from polar.training.learner import Learner
from polar.training.run import train
from tests.fakes.training_runs import quiet, settings

begun, dies_at = 0, int(sys.argv[3])
whole = Learner.learn

def learn(learner, batches):
    global begun
    begun += 1
    if begun == dies_at:
        # Part of the gradient is there, and the weights are those of the step before.
        die = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        learner.policy.parameters[0].register_post_accumulate_grad_hook(die)
    return whole(learner, batches)

Learner.learn = learn
train(settings(Path(sys.argv[1]), Path(sys.argv[2])), quiet())
"""


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_prefers_what_was_rewarded(tiny_model: Path, tmp_path: Path) -> None:
    run = settings(tiny_model, tmp_path)
    before = preference(run.model)
    kept = train(run, quiet())
    assert preference(run.model, kept.weights) > before + 0.5
    found = lines(run.out)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert {
        "reward",
        "loss",
        "entropy",
        "behaviour_kl",
        "tis_fraction",
        "clip_fraction",
        "staleness",
        "lr",
    } <= (found[0].keys())
    assert found[0]["reward"] == 0.5
    assert [one.step for one in checkpoints(run.out / CHECKPOINTS)] == [4, 6]


def test_a_model_with_linear_attention_learns_from_trees_as_from_traces(
    tiny_hybrid: Path, tmp_path: Path
) -> None:
    model = {"name": str(tiny_hybrid), "device": "cpu", "precision": "float64"}
    runs = [
        settings(tiny_hybrid, tmp_path / pack, model=model, batch={"tokens": 40, "pack": pack}, steps=3)
        for pack in ("tree", "alone")
    ]
    before = preference(runs[0].model)
    trees, alone = (tensors(train(run, quiet()).weights) for run in runs)
    for name, value in trees.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-7)
    assert preference(runs[0].model, runs[0].out / CHECKPOINTS / "step-000003" / "weights") > before + 0.05
    computed = [sum(line["tokens"] for line in lines(run.out)) for run in runs]
    assert computed[0] < computed[1]


def test_an_adapter_learns_and_leaves_the_model_alone(tiny_model: Path, tmp_path: Path) -> None:
    model = {"name": str(tiny_model), "device": "cpu", "lora": {"rank": 4, "alpha": 8}}
    run = settings(tiny_model, tmp_path, model=model, optimizer={"lr": 1e-2}, steps=4)
    before = preference(run.model)
    kept = train(run, quiet())
    assert preference(run.model, kept.weights) > before + 0.5
    assert all("lora" in name for name in tensors(kept.weights))


def test_a_run_killed_in_a_step_goes_on_to_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    whole = train(settings(tiny_model, tmp_path / "whole"), quiet())
    killed = settings(tiny_model, tmp_path / "killed")
    process = subprocess.run(
        [sys.executable, "-c", KILLED_IN_A_STEP, str(tiny_model), str(tmp_path / "killed"), "4"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert len(lines(killed.out)) == 3
    left = latest(killed.out / CHECKPOINTS)
    assert left is not None
    assert left.step == 2
    resumed = train(killed, quiet())
    assert same_tensors(whole.weights, resumed.weights)
    told = [{name: line[name] for name in ("step", "loss", "grad_norm", "lr")} for line in lines(killed.out)]
    assert told == [{name: line[name] for name in told[0]} for line in lines(tmp_path / "whole" / "run")]


class Versioned:
    """Engines that give every push a version of its own, whatever was in the ones before."""

    def __init__(self) -> None:
        self.version = 0

    def push(self, policy: Exports) -> int:
        self.version += 1
        return self.version


def test_what_was_sampled_before_a_stop_is_no_older_when_the_run_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    engines, run = Versioned(), settings(tiny_model, tmp_path, steps=2)
    for steps in (2, 3):
        going = run.model_copy(update={"steps": steps})
        with ExitStack() as stack:
            training = assemble(going, stack, lambda _: None)
            training.sink = engines
            training.run(stack.enter_context(board(going.metrics, going.out, training.step, quiet())))
    # 1 was what it began with, 3 the end of its second step, 4 the same weights once more, 5 its last step.
    assert training.versions == PolicyVersions(5, kept=3, again=4)


class Stuck(Versioned):
    """Engines that take the first weights, and others only when they have been asked six times."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def push(self, policy: Exports) -> int:
        self.asked += 1
        return self.version if 1 < self.asked < 6 else super().push(policy)


class Newest:
    """Everything is sampled by the newest policy that engines have."""

    def __init__(self, engines: Versioned, run: GrpoSettings) -> None:
        self._engines, self._run = engines, run

    def take(self, versions: PolicyVersions) -> Material:
        made = group((GOOD, BAD), (1.0, 0.0), logprob=LOGPROB, version=self._engines.version)
        return material([made], self._run.objective, self._run.batch, versions)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


def test_a_run_whose_weights_reach_no_engine_waits_within_its_bound(tiny_model: Path, tmp_path: Path) -> None:
    engines = Stuck()
    run = settings(tiny_model, tmp_path, steps=7, objective={"max_staleness": 1})
    with ExitStack() as stack:
        training = assemble(run, stack, lambda _: None)
        training.source, training.sink = Newest(engines, run), engines
        training.run(stack.enter_context(board(run.metrics, run.out, training.step, quiet())))
    # Two updates beyond what samples: then nothing is learnt until the engines have them.
    found = lines(run.out)
    assert [("loss" in line, line["version"]) for line in found] == [
        (True, 1),
        (True, 1),
        (False, 1),
        (False, 1),
        (False, 2),
        (True, 3),
        (True, 4),
    ]


def test_a_run_that_is_out_of_time_ends_after_a_step_and_goes_on_exactly(
    tiny_model: Path, tmp_path: Path
) -> None:
    whole = train(settings(tiny_model, tmp_path / "whole", steps=3), quiet())
    hasty = settings(tiny_model, tmp_path / "hasty", steps=3, seconds=1e-9)
    # Without the limit a checkpoint is made every second step.
    assert [train(hasty, quiet()).step for _ in range(4)] == [1, 2, 3, 3]
    last = latest(hasty.out / CHECKPOINTS)
    assert last is not None
    assert same_tensors(whole.weights, last.weights)


def test_going_on_takes_the_optimizer_s_settings_as_they_are_now(tiny_model: Path, tmp_path: Path) -> None:
    kept = train(settings(tiny_model, tmp_path, steps=1), quiet())
    before, after = tensors(kept.weights), {}
    now: dict[str, Any] = {"same": {}, "betas": {"betas": (0.5, 0.6)}, "decay": {"weight_decay": 0.25}}
    for name, changed in now.items():
        shutil.copytree(tmp_path / "run", tmp_path / name)
        going = settings(
            tiny_model, tmp_path, steps=2, out=tmp_path / name, optimizer={"lr": 1e-3, **changed}
        )
        after[name] = tensors(train(going, quiet()).weights)
    assert any(not torch.equal(after["betas"][name], value) for name, value in after["same"].items())
    for name, value in after["same"].items():
        assert torch.allclose(after["decay"][name], value - 1e-3 * 0.25 * before[name], atol=1e-6)


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "adapter"])
def test_going_on_keeps_the_reference_of_the_beginning(
    tiny_model: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    changes: dict[str, Any] = {
        "model": {"name": str(tiny_model), "device": "cpu", "lora": lora},
        "objective": {"kl": 0.1},
        "optimizer": {"lr": 1e-2, "updates": 2},
        "checkpoint": {"every": 1},
        "steps": 3,
    }
    whole = train(settings(tiny_model, tmp_path / "whole", **changes), quiet())
    halves = settings(tiny_model, tmp_path / "halves", **changes)
    train(halves.model_copy(update={"steps": 2}), quiet())
    assert same_tensors(whole.weights, train(halves, quiet()).weights)
    assert all(line["kl"] > 0 for line in lines(halves.out))


def test_going_on_with_a_reference_reads_the_weights_of_all_experts(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    model = ModelSettings(name=str(tmp_path / "model"), device="cpu")
    policy = load_policy(model)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(1.0)
    policy.save(tmp_path / "weights")
    went_on = load_policy(model, weights=tmp_path / "weights", has_reference=True)
    for ours, theirs in zip(policy.parameters, went_on.parameters, strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = settings(tiny_model, tmp_path)
    with ExitStack() as stack:
        training = assemble(run, stack, print)
        with pytest.raises(Diverged, match=r"step 1: the loss is nan.*step-000000"):
            _poison_then_run(training)
    kept = latest(run.out / CHECKPOINTS)
    assert kept is not None
    assert all(bool(value.isfinite().all()) for value in tensors(kept.weights).values())


def _poison_then_run(training: Any) -> None:
    policy = training.learner.policy
    measure = policy.measure

    def poisoned(batch: Any) -> Any:
        logprobs, entropy = measure(batch)
        return logprobs * torch.tensor(float("nan")), entropy

    policy.measure = poisoned
    training.run(lambda _step, _numbers: None)


def test_a_policy_far_from_the_recorded_one_counts_as_diverged(tiny_model: Path, tmp_path: Path) -> None:
    run = settings(tiny_model, tmp_path, limits={"behaviour_kl": 1e-6})
    with pytest.raises(Diverged, match="behaviour_kl"):
        train(run, quiet())


def test_one_token_far_from_the_recorded_policy_stops_no_run() -> None:
    made = material(groups(1), ObjectiveSettings(), BatchSettings(), PolicyVersions(0))
    (batch,) = made.packing.batches
    now = torch.full((len(batch.terms),), -1.0)
    logprobs = now.numpy().copy()
    logprobs[0] = -40.0
    odd = replace(batch, terms=replace(batch.terms, logprobs=logprobs))
    loss = policy_loss(odd, Measured(now, torch.zeros_like(now)), ObjectiveSettings())
    assert float(loss.sums["behaviour_kl"]) / len(now) < 10


@pytest.mark.parametrize(("lora", "lr"), [(None, 1e-6), ({"rank": 2}, 1e-5)], ids=["all", "adapter"])
def test_the_learning_rate_is_chosen_by_what_is_trained_and_said(
    tiny_model: Path, tmp_path: Path, lora: dict[str, int] | None, lr: float
) -> None:
    model = {"name": str(tiny_model), "device": "cpu", "lora": lora}
    said: list[str] = []
    with ExitStack() as stack:
        training = assemble(settings(tiny_model, tmp_path, model=model, optimizer={}), stack, said.append)
    assert training.learner.lr == lr
    assert any(f"{lr:g}" in line for line in said)


def test_a_step_without_anything_to_learn_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    run = settings(tiny_model, tmp_path, objective={"temperature": 0.5}, steps=2)
    kept = train(run, quiet())
    assert same_tensors(tiny_model, kept.weights)
    assert [line["excluded/tokens_off_distribution"] for line in lines(run.out)] == [32.0, 32.0]


def test_two_trainers_do_not_share_a_directory(tiny_model: Path, tmp_path: Path) -> None:
    run = settings(tiny_model, tmp_path)
    run.out.mkdir()
    with only_writer(run.out, "train"), pytest.raises(Conflict):
        train(run, quiet())


def test_held_out_tasks_are_measured_once_before_the_first_step(tiny_model: Path, tmp_path: Path) -> None:
    run = settings(tiny_model, tmp_path, steps=2)
    asked: list[tuple[int, bool]] = []

    def held_out(step: int, is_last: bool) -> dict[str, float]:
        asked.append((step, is_last))
        return {"held_out_success": step / 10}

    for steps in (1, 2):
        with ExitStack() as stack:
            training = assemble(run.model_copy(update={"steps": steps}), stack, print)
            training.held_out = held_out
            training.run(stack.enter_context(board(run.metrics, run.out, training.step, quiet())))
    assert asked == [(0, False), (1, True), (2, True)]
    assert [(line["step"], line["held_out_success"]) for line in lines(run.out)] == [
        (0, 0),
        (1, 0.1),
        (2, 0.2),
    ]
