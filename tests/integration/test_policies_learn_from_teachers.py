"""On-policy distillation: an engine with another model says what it holds of what the policy sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from polar.config.settings import EngineSettings
from polar.engines.process import started_engine
from polar.errors import InvalidInput
from polar.training.learner import Learner
from polar.training.material import PolicyVersions, material
from polar.training.objective import policy_loss
from polar.training.policy import TrainerPolicy, load_policy
from polar.training.run import in_thread, train
from polar.training.settings import (
    BatchSettings,
    DivergenceLimits,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    TeacherSettings,
)
from polar.training.teacher import connected_teacher
from polar.trajectory.learnable import Group
from tests.fakes.scripted_rollouts import sample, turns
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.training_runs import quiet, settings

STEPS, SAMPLES, TOKENS = 10, 16, 12
PROMPT = [5, 6, 7]


def ignore(_: str) -> None:
    """Nobody is told what is started."""


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("teacher"), hidden_size=32)


@pytest.fixture(scope="module")
def url(teacher_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = EngineSettings(kind="embedded", model=str(teacher_model), device="cpu", threads=1)

    @asynccontextmanager
    async def started() -> AsyncIterator[str]:
        async with started_engine(engine, tmp_path_factory.mktemp("log") / "engine.log", ignore) as process:
            yield process.url

    with in_thread("the teacher's engine", started()) as found:
        yield found


def sampled(policy: TrainerPolicy, number: int) -> Group:
    """Answers of the policy as it is, with its logprobs; nobody has rewarded them."""
    with torch.no_grad():
        ids = torch.tensor([PROMPT] * SAMPLES)
        for _ in range(TOKENS):
            logits = policy.model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        logprobs = policy.model(ids, use_cache=False).logits.log_softmax(-1)
    taken = logprobs[:, len(PROMPT) - 1 : -1].gather(2, ids[:, len(PROMPT) :, None])[..., 0]
    sessions = []
    for at, (answer, said) in enumerate(zip(ids[:, len(PROMPT) :].tolist(), taken.numpy(), strict=True)):
        (turn,) = turns(PROMPT, [answer])
        turn = replace(turn, logprobs=said.astype(np.float32))
        sessions.append(sample((turn,), 0.0, task_id=f"t{number}", number=at))
    return Group(f"t{number}", tuple(sessions))


def divergence(policy: TrainerPolicy, teacher: Any, answers: Sequence[NDArray[np.int32]]) -> float:
    """KL(policy, teacher) over the whole vocabulary, after each token of these answers."""
    ids = torch.tensor([[*PROMPT, *answer] for answer in answers])
    with torch.no_grad():
        ours, theirs = (
            model(ids, use_cache=False).logits[:, len(PROMPT) - 1 : -1].log_softmax(-1)
            for model in (policy.model, teacher)
        )
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def test_the_policys_divergence_from_its_teacher_falls(tmp_path: Path, teacher_model: Path, url: str) -> None:
    torch.manual_seed(0)
    policy = load_policy(ModelSettings(name=str(write_tiny_llama(tmp_path / "model")), device="cpu"))
    teacher = AutoModelForCausalLM.from_pretrained(teacher_model)
    asked = TeacherSettings(url=url)
    objective = ObjectiveSettings(name="distill", teacher=asked)
    limits, optimizer = DivergenceLimits(), OptimizerSettings(lr=6e-3)
    found, exact = [], []
    with in_thread("the teacher", connected_teacher(asked, tmp_path, policy.directory, ignore)) as engine:
        loss = partial(policy_loss, settings=objective)
        learner = Learner(policy, loss, optimizer, limits, STEPS, teacher=engine.logprobs)
        for step in range(STEPS):
            group = sampled(policy, step)
            made = material([group], objective, BatchSettings(), PolicyVersions(0))
            answers = [one.recording.completions[0].sampled_ids for one in group.samples if one.recording]
            exact.append(divergence(policy, teacher, answers))
            found.append(learner.learn(made)["kl"])
    assert np.mean(exact[-3:]) < 0.7 * np.mean(exact[:3])
    # What the sampled tokens say of it is an estimate of it.
    assert np.mean(found) == pytest.approx(np.mean(exact), rel=0.25)


def test_a_run_starts_the_teacher_that_it_names(tmp_path: Path, teacher_model: Path) -> None:
    console = quiet()
    teacher = {"kind": "embedded", "model": str(teacher_model), "device": "cpu", "threads": 1}
    model = write_tiny_llama(tmp_path / "model")
    train(settings(model, tmp_path, steps=1, objective={"name": "distill", "teacher": teacher}), console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the objective is distill: advantage none" in said
    assert "the teacher is" in said
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["kl"] > 0
    assert line["grad_norm"] > 0


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path, url: str) -> None:
    model = write_tiny_llama(tmp_path / "model")
    file = model / "tokenizer.json"
    # One control token more is enough.
    tokenizer = json.loads(file.read_text())
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"].append(last | {"id": last["id"] + 1, "content": "<think>"})
    file.write_text(json.dumps(tokenizer))

    async def connect() -> None:
        async with connected_teacher(TeacherSettings(url=url), tmp_path, model, ignore):
            pass

    with pytest.raises(InvalidInput, match="has another tokenizer than the policy"):
        asyncio.run(connect())
