"""A rank that dies, fails or hangs ends the whole run with one message, and the run resumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from polar.training.checkpoint import latest
from polar.training.loop import CHECKPOINTS
from tests.fakes.ranks import run_of, trained
from tests.waiting import eventually

POLAR = [sys.executable, "-m", "polar", "train"]
HASTY = """
import sys
from datetime import timedelta
from polar.training import ranks
ranks.DEADLINE = ranks.FILES_DEADLINE = timedelta(seconds=5)
ranks.STOP_SECONDS = 1.0
from polar.cli.main import main
main()
"""
FAILING = """
from polar.training.learner import Learner
learn = Learner.learn
def failing(learner, batches):
    if learner.policy.ranks.rank == 1 and learner.state()["steps"] == 3:
        raise OSError("no space left on device")
    return learn(learner, batches)
Learner.learn = failing
"""
"""Run by the interpreter of every process before anything else."""
WAITING = """
import sys
from pathlib import Path
from threading import Event
from polar.training.ranks import joined
from polar.training.settings import GrpoSettings, load_run
with joined(load_run(Path(sys.argv[1]), GrpoSettings), 2) as ranks, ranks.explained():
    print("all are here", file=sys.stderr)
    Event().wait(600)
"""
"""What rank 0 does while it collects for hours: it waits, with nothing that tells it of other ranks."""
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *RENDEZVOUS]
STARTED_BY = {
    "polar": lambda path: [*POLAR, path, "--processes", "2"],
    "torchrun": lambda path: [*TORCHRUN, "-m", "polar", "train", path],
}


def written(tiny_model: Path, directory: Path) -> Path:
    """The file of a run that does not end by itself."""
    run = run_of(tiny_model, directory, steps=100_000, checkpoint={"every": 2})
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json", exclude_defaults=True)))
    return path


class Running:
    """A run in processes of its own, with what it says."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self.out = directory / "run"
        self._said = directory / "said"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{directory}:."}
        with self._said.open("w") as said:
            self.process = subprocess.Popen(command, stderr=said, env=environment, start_new_session=True)

    @property
    def said(self) -> str:
        return self._said.read_text()

    def steps(self) -> int:
        file = self.out / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    async def reaches(self, step: int) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.said
            return self.steps() >= step

        await eventually(look, 240)

    def ranks(self) -> list[int]:
        """The processes below this one."""
        return _children(self.process.pid)

    async def ends(self, seconds: float = 60) -> int:
        await eventually(lambda: self.process.poll() is not None, seconds)
        return self.process.wait()


def _children(pid: int) -> list[int]:
    found = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [below for one in found for below in _children(one)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def running(command: list[str], directory: Path) -> Iterator[Running]:
    run = Running(command, directory)
    below: list[int] = []
    try:
        yield run
    finally:
        if run.process.poll() is None:
            below = run.ranks()
            run.process.kill()
            run.process.wait()
        for pid in filter(is_running, below):
            os.kill(pid, signal.SIGKILL)


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error:")]


def resumes(tiny_model: Path, directory: Path) -> None:
    kept = latest(directory / "run" / CHECKPOINTS)
    assert kept is not None
    assert kept.step >= 2
    run = run_of(tiny_model, directory, steps=kept.step + 1)
    assert trained(run, processes=1).step == kept.step + 1


async def test_a_rank_that_is_killed_is_named_and_the_run_resumes(tiny_model: Path, tmp_path: Path) -> None:
    path = written(tiny_model, tmp_path)
    with running([*POLAR, str(path), "--processes", "3"], tmp_path) as run:
        await run.reaches(3)
        ranks = run.ranks()
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        assert await run.ends() == 1
        (error,) = errors(run.said)
        assert re.fullmatch(
            r"error: rank \d of 3 was ended by SIGKILL \(the same command resumes .*\)", error
        )
        await eventually(lambda: not any(map(is_running, ranks)))
    resumes(tiny_model, tmp_path)


async def test_a_rank_that_is_killed_ends_whatever_rank_0_waits_for(tiny_model: Path, tmp_path: Path) -> None:
    path = written(tiny_model, tmp_path)
    with running([sys.executable, "-c", WAITING, str(path)], tmp_path) as run:
        await eventually(lambda: "all are here" in run.said, 240)
        (rank,) = run.ranks()
        os.kill(rank, signal.SIGKILL)
        assert await run.ends() == 1
        assert "PolarError: rank 1 of 2 was ended by SIGKILL" in run.said


async def test_no_rank_outlives_the_one_that_leads(tiny_model: Path, tmp_path: Path) -> None:
    path = written(tiny_model, tmp_path)
    with running([*POLAR, str(path), "--processes", "2"], tmp_path) as run:
        await run.reaches(3)
        ranks = run.ranks()
        run.process.kill()
        await eventually(lambda: not any(map(is_running, ranks)))
        assert not errors(run.said)
    resumes(tiny_model, tmp_path)


async def test_an_interrupt_ends_all_ranks_and_leaves_a_run_that_resumes(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = written(tiny_model, tmp_path)
    with running([*POLAR, str(path), "--processes", "2"], tmp_path) as run:
        await run.reaches(3)
        ranks = run.ranks()
        os.killpg(run.process.pid, signal.SIGINT)
        assert await run.ends() == 130
        assert run.said.rstrip().endswith("stopped; run the same command to resume after the last checkpoint")
        assert "Traceback" not in run.said
        assert not any(map(is_running, ranks))
    resumes(tiny_model, tmp_path)


async def test_a_rank_that_hangs_ends_the_run_at_the_deadline(tiny_model: Path, tmp_path: Path) -> None:
    path = written(tiny_model, tmp_path)
    command = [sys.executable, "-c", HASTY, "train", str(path), "--processes", "2"]
    with running(command, tmp_path) as run:
        await run.reaches(3)
        ranks = run.ranks()
        os.kill(ranks[0], signal.SIGSTOP)
        assert await run.ends() == 1
        (error,) = errors(run.said)
        assert "the ranks lost each other" in error
        await eventually(lambda: not any(map(is_running, ranks)))


@pytest.mark.parametrize("by", STARTED_BY)
async def test_a_rank_that_fails_says_why_whoever_has_started_it(
    tiny_model: Path, tmp_path: Path, by: str
) -> None:
    path = written(tiny_model, tmp_path)
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    with running(STARTED_BY[by](str(path)), tmp_path) as run:
        assert await run.ends(240) == 1
        (error,) = errors(run.said)
        assert error.startswith("error: rank 1 of 2 failed: OSError: no space left on device")
    assert run.steps() == 3
    resumes(tiny_model, tmp_path)
