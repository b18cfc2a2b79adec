"""The guided first run: a whole system started, watched and ended by one command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polar import plugins
from polar.app.stack import running
from polar.assets.shipped import WARM_START
from polar.client import AsyncClient
from polar.config.settings import DEFAULT_MODEL, EngineSettings, Settings
from polar.models.component import Component
from polar.models.session import SessionResult, SessionStatus
from polar.models.task import TaskSpec
from polar.models.views import SessionView
from polar.runtimes.base import Runtime

REFRESH_SECONDS = 0.5

COLOURS = {
    SessionStatus.QUEUED: "dim",
    SessionStatus.INIT: "cyan",
    SessionStatus.READY: "blue",
    SessionStatus.RUNNING: "yellow",
    SessionStatus.POSTRUN: "magenta",
    SessionStatus.COMPLETED: "green",
    SessionStatus.FAILED: "red",
    SessionStatus.CANCELLED: "dim",
}


@dataclass(frozen=True, slots=True)
class Run:
    """What a quickstart leaves behind."""

    results: tuple[SessionResult, ...]
    seconds: float


def shipped_policy(engine: EngineSettings) -> Path | None:
    """The adapter that comes with the package, where the engine is one that it is made for."""
    is_default = engine.url is None and engine.model == DEFAULT_MODEL
    return WARM_START if is_default and (WARM_START / "adapter_config.json").is_file() else None


async def run(
    settings: Settings, tasks: Sequence[TaskSpec], console: Console, policy: Path | None = None
) -> Run:
    """Start everything, roll the tasks out with the policy if one is given, end everything."""
    started = time.monotonic()
    tasks = await _in_working_sandbox(tasks, console)
    settings = _allowing(settings, tasks)
    await _install_harnesses(tasks, console)
    async with (
        running(settings, lambda step: console.print(f"[dim]•[/] {step}"), policy=policy) as stack,
        AsyncClient(stack.url, stack.token) as client,
    ):
        for task in tasks:
            await client.submit(task)
        sessions = sum(task.samples for task in tasks)
        console.print(f"[dim]•[/] {len(tasks)} tasks submitted, {sessions} sessions\n")
        await _watch(client, {task.id for task in tasks}, console)
        results = await client.wait([task.id for task in tasks])
    return Run(tuple(results), time.monotonic() - started)


async def _in_working_sandbox(tasks: Sequence[TaskSpec], console: Console) -> list[TaskSpec]:
    """The tasks in the sandbox they name, or as plain processes where this machine does not allow it."""
    usable = []
    for task in tasks:
        runtime: type[Runtime] = plugins.load("runtimes", task.runtime.name)
        reason = await runtime.unavailable()
        if reason is not None:
            console.print(
                f"[yellow]![/] {task.id}: no {task.runtime.name} here: {reason}\n"
                "  Its agent runs as a plain process of your user, and nothing keeps it from your files."
            )
            task = task.model_copy(update={"runtime": Component(name="process")})
        usable.append(task)
    return usable


def _allowing(settings: Settings, tasks: Sequence[TaskSpec]) -> Settings:
    """The settings with the runtimes of these tasks allowed: who runs the quickstart owns the machine."""
    runtimes = tuple(sorted({*settings.node.runtimes, *(task.runtime.name for task in tasks)}))
    return settings.model_copy(update={"node": settings.node.model_copy(update={"runtimes": runtimes})})


async def _install_harnesses(tasks: Sequence[TaskSpec], console: Console) -> None:
    for name, task in {task.harness.name: task for task in tasks}.items():
        console.print(f"[dim]•[/] preparing harness {name} (downloaded once)")
        installation = await plugins.create("harnesses", "harness", task.harness).install()
        console.print(f"[dim]•[/] {name} {installation.version}")


async def _watch(client: AsyncClient, task_ids: set[str], console: Console) -> None:
    """Show every session until all have ended: a live table, or a line each where there is no terminal."""
    seen: set[str] = set()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            sessions = [session async for session in client.sessions() if session.task_id in task_ids]
            if console.is_terminal:
                live.update(_table(sessions), refresh=True)
            for session in sessions:
                if session.status.ended and session.id not in seen:
                    seen.add(session.id)
                    if not console.is_terminal:
                        console.print(_line(session))
            if len(seen) == len(sessions):
                return
            await asyncio.sleep(REFRESH_SECONDS)


def _table(sessions: Sequence[SessionView]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("session")
    table.add_column("stage")
    for column in ("completions", "tokens", "reward"):
        table.add_column(column, justify="right")
    for session in sessions:
        completions, tokens = _done(session)
        table.add_row(
            session.id,
            Text(session.status, style=COLOURS[session.status]),
            str(completions),
            str(tokens),
            _reward(session.result),
        )
    return table


def _line(session: SessionView) -> str:
    completions, tokens = _done(session)
    reward = _reward(session.result)
    return (
        f"{session.id:<28} {session.status:<10} {completions} completions, {tokens} tokens, reward {reward}"
    )


def _done(session: SessionView) -> tuple[int, int]:
    if session.result is not None:
        return session.result.stats.completions, session.result.stats.sampled_tokens
    return session.progress.completions, session.progress.sampled_tokens


def _reward(result: SessionResult | None) -> str:
    return "–" if result is None or result.reward is None else f"{result.reward:.2f}"


def summary(run: Run, data_dir: Path) -> Table:
    """The closing lines: what came out and where it is."""
    rewards = [result.reward for result in run.results if result.reward is not None]
    failed = [result for result in run.results if result.status is SessionStatus.FAILED]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("sessions", f"{len(run.results)} ended, {len(failed)} failed, {run.seconds:.0f} s in all")
    table.add_row("mean reward", f"{sum(rewards) / len(rewards):.3f}" if rewards else "none")
    if group := _widest(run.results):
        table.add_row("one group", f"{group[0].task_id}: {_spread(group)}")
    table.add_row(
        "tokens trained",
        f"{sum(r.stats.trainable_tokens for r in run.results)}"
        f" of {sum(r.stats.sampled_tokens for r in run.results)} sampled",
    )
    table.add_row("traces", str(sum(result.stats.traces for result in run.results)))
    table.add_row("data", str(data_dir))
    for result in failed[:3]:
        table.add_row("failed", f"{result.session_id}: {result.error}")
    return table


def _widest(results: Iterable[SessionResult]) -> list[SessionResult]:
    """The samples of the task whose rewards differ most; none where no task has two rewards."""
    groups: dict[str, list[SessionResult]] = {}
    for result in results:
        if result.reward is not None:
            groups.setdefault(result.task_id, []).append(result)
    several = [group for group in groups.values() if len(group) > 1]
    return max(several, key=lambda group: pstdev(_rewards(group)), default=[])


def _spread(group: Sequence[SessionResult]) -> str:
    """Rewards in the order of the samples, and what they deviate from their mean by: what training weighs."""
    rewards = _rewards(sorted(group, key=lambda result: result.sample))
    shown = "  ".join(f"{reward:.2f}" for reward in rewards)
    return f"{shown}  (mean {fmean(rewards):.2f}, deviation {pstdev(rewards):.2f})"


def _rewards(group: Iterable[SessionResult]) -> list[float]:
    return [result.reward for result in group if result.reward is not None]
