"""A tiny run over scripted groups: one of two answers is rewarded, and the policy can learn which."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from polar.training.material import PolicyVersions, material
from polar.training.policy import load_policy
from polar.training.settings import BatchSettings, GrpoSettings, ModelSettings, ObjectiveSettings
from polar.trajectory.learnable import Group
from tests.fakes.scripted_rollouts import group, write_recordings
from tests.systems import ASK

GOOD, BAD = [[10, 11, 12], [13]], [[20, 21, 22], [23]]
LOGPROB = -5.5
"""What an untrained policy with 258 tokens gives about any of them."""

GRADE = r"""
letters=$(tr -cd 'a-z' < answer.txt | wc -c)
all=$(wc -c < answer.txt)
reward "$(awk "BEGIN { print $letters / ($all + 1) }")"
"""
"""The share of small letters: any answer gets another reward, and more of them is something to learn."""


def groups(count: int = 4) -> list[Group]:
    return [
        group(
            (GOOD, BAD, GOOD, BAD),
            (1.0, 0.0, 1.0, 0.0),
            task_id=f"task-{number}",
            prompt=(1, 2, 3 + number),
            logprob=LOGPROB,
        )
        for number in range(count)
    ]


def settings(tiny_model: Path, directory: Path, **changes: Any) -> GrpoSettings:
    """A run over recordings of these groups."""
    recordings = directory / "recordings"
    if not recordings.exists():
        write_recordings(groups(), recordings)
    document = {
        "out": directory / "run",
        "steps": 6,
        "groups": 2,
        "model": {"name": str(tiny_model), "device": "cpu"},
        "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 1},
        # The recorded policy is made up, and far from the model's own.
        "limits": {"behaviour_kl": None},
        "batch": {"tokens": 40},
        "checkpoint": {"every": 2},
        "recordings": recordings,
    }
    return GrpoSettings.model_validate({**document, **changes})


def rolled_out(model: Path, directory: Path, **rollouts: Any) -> GrpoSettings:
    """A run that rolls tasks out with a system of its own, whose agents ask the model once."""
    tasks = [
        {
            "id": f"say-{number}",
            "instruction": f"Say {number}.",
            "harness": {"name": "shell", "options": {"command": ASK}},
            "runtime": "process",
            "evaluator": {"name": "command", "options": {"command": GRADE}},
            "sampling": {"max_tokens": 12},
        }
        for number in range(3)
    ]
    (directory / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    own = {"engine": {"device": "cpu", "threads": 1}, "node": {"runtimes": ["process"]}}
    (directory / "polar.yaml").write_text(yaml.safe_dump(own))
    document = {
        "out": directory / "run",
        "steps": 3,
        "groups": 1,
        "model": {"name": str(model), "device": "cpu"},
        "optimizer": {"lr": 3e-3},
        "objective": {"max_staleness": 1},
        "checkpoint": {"every": 1},
        "rollouts": {
            "tasks": [directory / "tasks.yaml"],
            "samples": 4,
            "concurrency": 4,
            "config": directory / "polar.yaml",
            **rollouts,
        },
    }
    return GrpoSettings.model_validate(document)


def quiet() -> Console:
    return Console(file=io.StringIO())


def tensors(weights: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in weights.glob("*.safetensors") for name, value in load_file(file).items()}


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two directories hold the very same bits."""
    ours, theirs = tensors(one), tensors(other)
    return bool(ours) and ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def preference(model: ModelSettings, weights: Path | None = None) -> float:
    """How much likelier the rewarded answers are than the others, in mean logprobs."""
    policy = load_policy(model, weights=weights)
    made = material(
        groups(), ObjectiveSettings(max_staleness=100), BatchSettings(), versions=PolicyVersions(0)
    )
    total = 0.0
    for batch in made.packing.batches:
        good = torch.as_tensor(batch.terms.advantages > 0)
        logprobs = policy.logprobs(batch)
        total += float(logprobs[good].sum() - logprobs[~good].sum())
    return total / sum(len(batch.terms) / 2 for batch in made.packing.batches)
