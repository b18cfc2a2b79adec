"""Evaluation without a node: a live sandbox with a task's files, and fresh ones like it on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from polar.config import plugins
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.models.component import Component
from polar.models.session import TrajectoryStats, Verdict
from polar.models.task import TaskSpec
from polar.node import evaluation as node_evaluation
from polar.runtimes.base import Command, ExecResult, Host, Runtime, Sandbox, SandboxSpec, ToolDirectory


def make_task(files: Mapping[str, str] | None = None, **fields: Any) -> TaskSpec:
    contents = {path: {"text": text} for path, text in (files or {}).items()}
    base = {"id": "t", "instruction": "x", "harness": "shell", "evaluator": "command", "files": contents}
    return TaskSpec.model_validate({**base, **fields})


@asynccontextmanager
async def evaluation(
    task: TaskSpec,
    directory: Path,
    *,
    timeout: float = 60.0,
    tools: tuple[ToolDirectory, ...] = (),
    **fields: Any,
) -> AsyncIterator[EvaluationContext]:
    """What an evaluator gets to see of a session whose agent has done nothing yet."""
    runtime: Runtime = plugins.create("runtimes", "runtime", task.runtime)
    numbers = count()

    @asynccontextmanager
    async def sandbox() -> AsyncIterator[Sandbox]:
        spec = SandboxSpec(f"sandbox-{next(numbers)}", "127.0.0.1", 0, tools)
        started = await runtime.start(spec, Host(directory))
        try:
            for path, file in task.files.items():
                await started.upload(started.workspace / path, file.data, executable=file.executable)
            yield started
        finally:
            await started.stop()

    async with sandbox() as live:
        yield EvaluationContext(
            task, live, TrajectoryStats(), timeout, sandbox_maker=sandbox,
            artifacts=directory / "artifacts", cache=directory / "cache", **fields,
        )  # fmt: skip


async def agent_does(context: EvaluationContext, script: str) -> ExecResult:
    """Play the agent."""
    command = Command(("/bin/sh", "-c", script))
    result = await context.sandbox.exec(command, timeout=30, log_name="agent")
    assert result.exit_code == 0, result.stderr.text()
    return result


def make_evaluator(name: str, **options: Any) -> Evaluator:
    evaluator: Evaluator = plugins.create("evaluators", "evaluator", Component(name=name, options=options))
    return evaluator


async def evaluate(context: EvaluationContext, name: str, **options: Any) -> Verdict:
    """As a node does it: what fails over the agent's work alone is worth nothing."""
    return await node_evaluation.evaluate(make_evaluator(name, **options), context)
