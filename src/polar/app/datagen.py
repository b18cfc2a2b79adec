"""`polar generate`: rolls out a taskset, resumably, writes it as a dataset and pushes it to the hub."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from polar.app.own_system import ServerAddress
from polar.app.rollouts import RolledOut, may_be_retried, retry_of, roll_out, with_stable_id
from polar.app.stack import Say
from polar.client import AsyncClient, Client
from polar.errors import Conflict, Forbidden, InvalidInput, PolarError, Unavailable
from polar.models.session import SessionResult, SessionStatus
from polar.models.task import Run, TaskSpec
from polar.recordings.recording import decode
from polar.tasksets.expressions import CannotJudge, Condition, session_names
from polar.tasksets.sft import CARD, Options, Table, TaskSessions, Written, card, write_dataset
from polar.trajectory.learnable import EndedSession

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile, RepoFolder

log = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Seconds between lines if no terminal shows a progress bar."""


def plan(tasks: Iterable[TaskSpec], run: str = "") -> dict[str, TaskSpec]:
    """Return the task to submit for each task of the taskset, by its id there."""
    return {task.id: with_stable_id(task, run) for task in tasks}


@dataclass(slots=True)
class DatasetGeneration:
    """One run over a plan. The server stores its results; here they are only counted."""

    plan: Mapping[str, TaskSpec]
    accept: Condition
    retries: int
    concurrency: int
    named: Run
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally(sum(task.samples for task in self.plan.values()))

    async def run(self, client: AsyncClient, changed: Callable[[], None] = lambda: None) -> None:
        """Run until every sample of every task has ended; `changed` is called when the tally changes."""
        names = {task.id: name for name, task in self.plan.items()}

        def ended(session: RolledOut) -> None:
            self.tally.add(session, is_accepted=self._is_accepted(names[session.task.id], session))
            changed()

        tasks = list(self.plan.values())
        await roll_out(
            client,
            tasks,
            ended,
            run=self.named,
            concurrency=self.concurrency,
            retries=self.retries,
            with_recordings=False,
        )

    def _is_accepted(self, name: str, session: RolledOut) -> bool:
        if session.result.status is not SessionStatus.COMPLETED:
            return False
        try:
            return self.accept(session_names(session.result, name, session.task.metadata))
        except CannotJudge:
            return False

    def sessions(self, client: Client) -> Iterator[TaskSessions]:
        """Yield the sessions that have ended, in the order of the plan, reading one task at a time."""
        for name, task in self.plan.items():
            results = [self._last(client, task, result) for result in _all_results(client, task.id)]
            if results:
                results.sort(key=lambda result: result.sample)
                yield TaskSessions(name, task.harness.name, task.metadata, _read_recordings(client, results))

    def _last(self, client: Client, task: TaskSpec, result: SessionResult) -> SessionResult:
        sample = result.sample
        for number in range(1, self.retries + 1):
            if not may_be_retried(task, result):
                break
            for later in _all_results(client, retry_of(task, sample, number).id):
                result = later.model_copy(update={"sample": sample})
        return result


def _all_results(client: Client, task_id: str) -> list[SessionResult]:
    """Return all results of a task, however stale: a dataset records the version of each token."""
    return [result for page in client.result_pages([task_id]) for result in page.results]


def _read_recordings(client: Client, results: Iterable[SessionResult]) -> Iterator[EndedSession]:
    for result in results:
        recording = decode(client.recording(result.session_id)) if result.has_recording else None
        yield EndedSession(result, recording)


async def generate(
    generation: DatasetGeneration,
    server: ServerAddress,
    out: Path,
    options: Options,
    console: Console,
) -> Written:
    """Run the generation and write its dataset; on cancellation, first write what has ended."""
    try:
        async with AsyncClient(server.url, server.token) as client:
            with show_tally(generation.tally, console) as changed:
                await generation.run(client, changed)
    except asyncio.CancelledError:
        await _write(generation, server, out, options)
        console.print("the dataset contains the sessions that have ended; run the same command to continue")
        raise
    return await _write(generation, server, out, options)


async def _write(
    generation: DatasetGeneration, server: ServerAddress, out: Path, options: Options
) -> Written:
    def write() -> Written:
        # In a thread, because the server may run on this event loop.
        with Client(server.url, server.token) as client:
            return write_dataset(generation.sessions(client), out, generation.accept)

    written = await asyncio.to_thread(write)
    (out / CARD).write_text(card(out.resolve().name, written, options), encoding="utf-8")
    return written


@dataclass(slots=True)
class Tally:
    """Counts of ended sessions; a retried session counts once, by its last attempt."""

    wanted: int
    """All samples, and the branches that have ended."""
    ended: int = 0
    accepted: int = 0
    failed: int = 0
    retried: int = 0
    found: int = 0
    """The number of ended sessions that had ended before this run."""
    sampled_tokens: int = 0
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def add(self, session: RolledOut, *, is_accepted: bool) -> None:
        self.ended += 1
        # How many branches a task gets is known once they are there.
        self.wanted += session.result.sample >= session.task.samples
        self.accepted += is_accepted
        self.failed += session.result.status is SessionStatus.FAILED
        self.found += session.was_found
        self.retried += session.retries
        self.sampled_tokens += 0 if session.was_found else session.result.stats.new_tokens

    @property
    def seconds(self) -> float:
        return max(self.clock() - self._began, 1e-9)

    @property
    def per_minute(self) -> float:
        """Sessions per minute that this run has ended, without those of earlier runs."""
        return 60 * (self.ended - self.found) / self.seconds

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.ended if self.ended else None

    @property
    def seconds_left(self) -> float | None:
        left = self.wanted - self.ended
        if not left:
            return 0.0
        return 60 * left / self.per_minute if self.per_minute else None

    def line(self) -> str:
        accepted = "–" if self.acceptance is None else f"{self.acceptance:.0%}"
        left = "–" if self.seconds_left is None else timedelta(seconds=round(self.seconds_left))
        parts = [
            f"{self.ended}/{self.wanted} sessions",
            f"{self.accepted} accepted ({accepted})",
            *([f"{self.failed} failed"] if self.failed else []),
            *([f"{self.retried} retried"] if self.retried else []),
            f"{self.per_minute:.1f} sessions/min",
            f"{self.sampled_tokens / self.seconds:.0f} tokens/s",
            f"{left} left",
        ]
        return " · ".join(parts)


@contextmanager
def show_tally(tally: Tally, console: Console) -> Iterator[Callable[[], None]]:
    """Show the tally during the block; the yielded function must be called after every change."""
    if console.is_terminal:
        columns = (TextColumn("generating"), BarColumn(), TextColumn("{task.fields[line]}", markup=False))
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=tally.wanted, line=tally.line())
            yield lambda: progress.update(bar, completed=tally.ended, total=tally.wanted, line=tally.line())
        return
    printed = tally.clock()

    def say() -> None:
        nonlocal printed
        if tally.clock() - printed >= LINE_SECONDS:
            printed = tally.clock()
            console.print(tally.line(), markup=False, soft_wrap=True)

    yield say
    console.print(tally.line(), markup=False, soft_wrap=True)


FILES = (CARD, *(table.file for table in Table))
"""The only files that are pushed: never recordings, logs, state or keys."""
_TOKENS = "set HF_TOKEN to a token from https://huggingface.co/settings/tokens, or run `hf auth login`"


@dataclass(frozen=True, slots=True)
class HubDataset:
    name: str
    """The name as OWNER/NAME."""
    private: bool

    @classmethod
    def check(cls, name: str, *, private: bool) -> HubDataset:
        """Check, before anything is generated, what would prevent a push, as far as can be known here."""
        from huggingface_hub import get_token
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise InvalidInput(f"--push-to-hub {name}: {error}") from None
        if "/" not in name:
            raise InvalidInput(f"--push-to-hub {name}: must be OWNER/NAME")
        if get_token() is None:
            raise InvalidInput("--push-to-hub: no Hugging Face token found", hint=_TOKENS)
        return cls(name, private)

    def push(self, directory: Path, say: Say) -> None:
        """Update the repository to the content of the directory, creating it if it is missing."""
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        api = HfApi()
        with _hub_errors(self.name, f"the dataset is in {directory}; run the same command to push it"):
            private = self.private or None  # None keeps the owner's default
            url = api.create_repo(self.name, repo_type="dataset", private=private, exist_ok=True)
            if self.private and not api.repo_info(self.name, repo_type="dataset").private:
                raise Conflict(f"{url} is public", hint="make it private in its settings, or choose another")
            there = api.get_paths_info(self.name, list(FILES), repo_type="dataset")
            stored = {file.path: file for file in there}
            changed = [name for name in FILES if not _is_as_stored(directory / name, stored.get(name))]
            if not changed:
                say(f"{url} is up to date")
                return
            size = sum((directory / name).stat().st_size for name in changed)
            say(f"pushing {', '.join(changed)} ({size / 1e6:.1f} MB)")
            api.create_commit(
                self.name,
                [CommitOperationAdd(name, directory / name) for name in changed],
                commit_message="Write the dataset with polar generate",
                repo_type="dataset",
            )
            say(f"pushed to {url}")


def _is_as_stored(file: Path, stored: RepoFile | RepoFolder | None) -> bool:
    """Whether a file equals the hub's, which has the digest of large files and git's for others."""
    from huggingface_hub.hf_api import RepoFile

    if not isinstance(stored, RepoFile):
        return False
    if stored.lfs is not None:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == stored.lfs.sha256
    small = file.read_bytes()
    return hashlib.sha1(b"blob %d\0%b" % (len(small), small)).hexdigest() == stored.blob_id


@contextmanager
def _hub_errors(name: str, kept: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except PolarError as error:
        error.message += f"; {kept}"
        raise
    except Exception as error:
        log.warning("pushing to %s failed", name, exc_info=True)
        match error.response.status_code if isinstance(error, HfHubHTTPError) else None:
            case 401:
                raise Forbidden(f"the hub rejected the token; {kept}", hint=_TOKENS) from error
            case 403 | 404:
                hint = f"choose a repository of yours, or {_TOKENS}"
                raise Forbidden(f"the token may not write to {name} on the hub; {kept}", hint=hint) from error
            case _:
                said = " ".join(str(error).split()) or type(error).__name__
                raise Unavailable(f"cannot write to the hub ({said}); {kept}") from error
