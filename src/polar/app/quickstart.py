"""The guided first run: one command starts, shows and stops a whole system."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from polar import assets
from polar.app.own_system import rollout_server
from polar.app.rollouts import roll_out
from polar.client import AsyncClient
from polar.config import plugins
from polar.config.settings import DEFAULT_MODEL, EngineSettings, Settings
from polar.errors import InvalidInput
from polar.models.component import Component
from polar.models.session import SessionResult, SessionStatus
from polar.models.task import Run, TaskSpec
from polar.models.views import SessionView
from polar.runtimes.base import Runtime
from polar.trajectory.learnable import EndedSession, Group

EXAMPLES = Path(assets.__file__).parent / "examples"
"""Example tasks and runs. In a clone, links to the project's `examples`; a wheel holds the files."""
WARM_START = EXAMPLES / "warm-start"
"""A LoRA adapter for the default model, trained on such tasks by examples/grpo-pi."""
_LEFT_OUT = ("__pycache__", ".egg-info")

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


def shipped_policy(engine: EngineSettings) -> Path | None:
    """Return the adapter that comes with the package, if the engine is the one it is made for."""
    is_default = engine.url is None and engine.model == DEFAULT_MODEL
    return WARM_START if is_default and (WARM_START / "adapter_config.json").is_file() else None


async def run(
    settings: Settings, tasks: Sequence[TaskSpec], console: Console, policy: Path | None = None
) -> list[SessionResult]:
    """Start everything, roll out the tasks, with `policy` if given, and stop everything."""

    def say(step: str) -> None:
        console.print(f"[dim]•[/] {escape(step)}")

    tasks = await _in_working_sandbox(tasks, console)
    # The user owns the machine, so all runtimes of the quickstart's tasks are allowed.
    runtimes = tuple(sorted({*settings.node.runtimes, *(task.runtime.name for task in tasks)}))
    settings = settings.updated(node={"runtimes": runtimes})
    results: list[SessionResult] = []
    async with (
        rollout_server(settings, tasks, say, policy=policy) as system,
        AsyncClient(system.url, system.token) as client,
    ):
        sessions = sum(task.samples for task in tasks)
        console.print(f"[dim]•[/] {len(tasks)} tasks, {sessions} sessions\n")
        rolling = asyncio.create_task(
            roll_out(
                client,
                tasks,
                lambda ended: results.append(ended.result),
                run=Run(name="quickstart"),
                with_recordings=False,
            )
        )
        try:
            await _watch(client, rolling, {task.id for task in tasks}, console)
            await rolling
        finally:
            rolling.cancel()
    return results


async def _in_working_sandbox(tasks: Sequence[TaskSpec], console: Console) -> list[TaskSpec]:
    """Return the tasks, as plain processes where this machine does not support their sandbox."""
    usable = []
    for task in tasks:
        runtime: type[Runtime] = plugins.load("runtimes", task.runtime.name)
        reason = await runtime.unavailable()
        if reason is not None:
            console.print(
                f"[yellow]![/] {task.id}: {task.runtime.name} is not available: {reason}\n"
                "  Its agent runs as a plain process with your user's access to your files."
            )
            task = task.model_copy(update={"runtime": Component(name="process")})
        usable.append(task)
    return usable


async def _watch(
    client: AsyncClient, rolling: asyncio.Task[None], task_ids: set[str], console: Console
) -> None:
    """Show every session until all have ended: in a live table, or one line each without a terminal."""
    seen: set[str] = set()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        is_over = False
        while not is_over:
            is_over = bool((await asyncio.wait([rolling], timeout=REFRESH_SECONDS))[0])
            sessions = [session async for session in client.sessions() if session.task_id in task_ids]
            if console.is_terminal:
                live.update(_table(sessions), refresh=True)
            for session in sessions:
                if session.status.ended and session.id not in seen and not console.is_terminal:
                    seen.add(session.id)
                    console.print(_line(session))


def _table(sessions: Sequence[SessionView]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("session")
    table.add_column("stage")
    for column in ("model calls", "tokens", "reward"):
        table.add_column(column, justify="right")
    for session in sessions:
        status = Text(session.status, style=COLOURS[session.status])
        table.add_row(session.id, status, *_numbers(session))
    return table


def _line(session: SessionView) -> str:
    calls, tokens, reward = _numbers(session)
    return f"{session.id:<28} {session.status:<10} {calls} model calls, {tokens} tokens, reward {reward}"


def _numbers(session: SessionView) -> tuple[str, str, str]:
    result = session.result
    done = session.progress if result is None else result.stats
    reward = "–" if result is None or result.reward is None else f"{result.reward:.2f}"
    return str(done.completions), str(done.sampled_tokens), reward


def summary(results: Sequence[SessionResult], seconds: float, data_dir: Path) -> Table:
    """Return the summary: the results and where they are."""
    rewards = [result.reward for result in results if result.reward is not None]
    failed = [result for result in results if result.status is SessionStatus.FAILED]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("sessions", f"{len(results)} ended, {len(failed)} failed, {seconds:.0f} s in all")
    table.add_row("mean reward", f"{sum(rewards) / len(rewards):.3f}" if rewards else "none")
    if group := _most_different(results):
        table.add_row("one group", _describe(group))
    table.add_row(
        "tokens trained",
        f"{sum(r.stats.trainable_tokens for r in results)}"
        f" of {sum(r.stats.sampled_tokens for r in results)} sampled",
    )
    table.add_row("traces", str(sum(result.stats.traces for result in results)))
    table.add_row("data", str(data_dir))
    for result in failed[:3]:
        table.add_row("failed", f"{result.session_id}: {result.error}")
    return table


def _most_different(results: Iterable[SessionResult]) -> Group | None:
    """Return the group whose rewards differ most; None if no task has two rewards."""
    samples: dict[str, list[EndedSession]] = {}
    for result in sorted(results, key=lambda result: result.sample):
        if result.reward is not None:
            samples.setdefault(result.task_id, []).append(EndedSession(result))
    groups = [Group(task_id, tuple(found)) for task_id, found in samples.items() if len(found) > 1]
    return max(groups, key=lambda group: pstdev(group.rewards), default=None)


def _describe(group: Group) -> str:
    shown = "  ".join(f"{reward:.2f}" for reward in group.rewards)
    deviation = pstdev(group.rewards)
    return f"{group.task_id}: {shown}  (mean {fmean(group.rewards):.2f}, standard deviation {deviation:.2f})"


def copy_examples(into: Path) -> list[Path]:
    """Copy the examples below a directory; if a file there differs, refuse and write nothing."""
    found = (file for directory in EXAMPLES.iterdir() for file in directory.rglob("*") if file.is_file())
    files = sorted(file for file in found if not file.parent.name.endswith(_LEFT_OUT))
    copies = {into / file.relative_to(EXAMPLES): file.read_bytes() for file in files}
    try:
        _copy(copies)
    except OSError as error:
        raise InvalidInput(f"{into}: cannot write: {error.strerror}") from None
    return list(copies)


def _copy(copies: Mapping[Path, bytes]) -> None:
    changed = [path for path, data in copies.items() if path.exists() and path.read_bytes() != data]
    if changed:
        raise InvalidInput(
            f"{', '.join(map(str, changed))}: not overwritten, because the contents differ",
            hint="name another directory: polar examples DIR",
        )
    for path, data in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
