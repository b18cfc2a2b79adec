"""A server of the run's own works beside the trainer: both get their turns, and it ends with the run."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polar.app.own_system import ServerAddress
from polar.config.settings import Settings
from polar.errors import NotInstalled
from polar.training import run
from polar.training.run import TURN_SECONDS, server_beside_trainer
from polar.training.settings import GrpoSettings, RolloutSettings

HERE = ServerAddress("http://127.0.0.1:1", "token")


def settings(out: Path, **rollouts: Any) -> tuple[GrpoSettings, RolloutSettings]:
    made = GrpoSettings.model_validate({"out": out, "steps": 1, "rollouts": {"tasks": ["none"], **rollouts}})
    assert made.rollouts is not None
    return made, made.rollouts


def test_threads_take_short_turns_while_both_work_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    @asynccontextmanager
    async def started(*_: object) -> AsyncIterator[ServerAddress]:
        yield HERE
        ended.append(True)

    monkeypatch.setattr(run, "rollout_server", started)
    before = sys.getswitchinterval()
    with server_beside_trainer(*settings(tmp_path), [], print) as place:
        assert place == HERE
        assert sys.getswitchinterval() == pytest.approx(TURN_SECONDS)
        assert not ended
    assert ended
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize(
    ("model", "engine", "share"),
    [({}, "{}", 0.4), ({"device": "cpu"}, "{}", None), ({}, "{gpu_memory: 0.7}", 0.7)],
    ids=["by default", "trained on a CPU", "as the settings say"],
)
def test_an_engine_on_the_trainer_s_gpu_leaves_it_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, str], engine: str, share: float | None
) -> None:
    shares = []

    @asynccontextmanager
    async def started(own: Settings, *_: object) -> AsyncIterator[ServerAddress]:
        shares.append(own.engine.gpu_memory)
        yield HERE

    monkeypatch.setattr(run, "rollout_server", started)
    (tmp_path / "system.yaml").write_text(f"engine: {engine}\n")
    made, rollouts = settings(tmp_path, config=tmp_path / "system.yaml")
    made = made.model_copy(update={"model": made.model.model_copy(update=model)})
    with server_beside_trainer(made, rollouts, [], print):
        assert shares == [share]


def test_a_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def started(*_: object) -> AsyncIterator[ServerAddress]:
        raise NotInstalled("runtime bubblewrap: not here")
        yield HERE

    monkeypatch.setattr(run, "rollout_server", started)
    before = sys.getswitchinterval()
    with pytest.raises(NotInstalled, match="not here"), server_beside_trainer(*settings(tmp_path), [], print):
        pass
    assert sys.getswitchinterval() == before


class Lingering(threading.Thread):
    """Is still there for a while when its work is done, as any thread may be."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._done, self._may_end = threading.Event(), threading.Event()

    def run(self) -> None:
        super().run()
        self._done.set()
        self._may_end.wait(60)

    def is_alive(self) -> bool:
        self._done.wait(60)
        return super().is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._may_end.set()
        super().join(timeout)


def test_why_it_cannot_start_is_said_also_while_its_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "Thread", Lingering)
    test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch)


def test_a_server_that_ends_by_itself_hides_no_error_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = threading.Event()

    @asynccontextmanager
    async def started(*_: object) -> AsyncIterator[ServerAddress]:
        try:
            # As it does where a part in the background fails: the rest is cancelled.
            async with asyncio.timeout(0):
                yield HERE
        finally:
            has_ended.set()

    def fail() -> None:
        with server_beside_trainer(*settings(tmp_path), [], print):
            assert has_ended.wait(60)
            raise NotInstalled("the trainer's own reason")

    monkeypatch.setattr(run, "rollout_server", started)
    with pytest.raises(NotInstalled, match="the trainer's own"):
        fail()


def test_a_server_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    with server_beside_trainer(*settings(tmp_path, server="http://127.0.0.1:2"), [], print) as place:
        assert place.url == "http://127.0.0.1:2"
        assert sys.getswitchinterval() == before
