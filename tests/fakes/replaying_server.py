"""A server as `polar replay` and `polar branch` see it: whatever is begun there has ended as a test says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polar.errors import Unavailable
from polar.models.session import Origin, Progress, ReplayReport, SessionResult, SessionStatus, Verdict
from polar.models.views import ResultPage, SessionView


class ReplayingServer:
    """A server on which every session that is begun has ended as the test says."""

    def __init__(self) -> None:
        self.report: ReplayReport | None = None
        self.status = SessionStatus.COMPLETED
        self.asked: list[tuple[Any, ...]] = []
        self.begun: list[SessionView] = []
        self.lost_answers = 0

    def __call__(self, *_: object) -> ReplayingServer:
        return self

    def __enter__(self) -> ReplayingServer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def branch(self, session_id: str, calls: int, samples: int, **ways: Any) -> list[SessionView]:
        self._ask((session_id, calls, samples), ways.pop("request_id"))
        origin = Origin(session_id=session_id, calls=calls, **ways)
        return self._begin([(f"t.{1 + number}", "t") for number in range(samples)], origin)

    def replay(self, session_id: str, calls: int | None, **ways: Any) -> SessionView:
        about = {"calls": calls, "on_divergence": ways["on_divergence"]}
        self._ask((session_id, calls), ways["request_id"])
        origin = Origin(session_id=session_id, samples_on=False, **about)
        return self._begin([("t.0-replay-1.0", "t.0-replay-1")], origin)[0]

    def result_pages(self, task_ids: list[str], *, follow: bool) -> Iterator[ResultPage]:
        assert follow
        assert task_ids == [self.begun[0].task_id]
        for number, view in enumerate(self.begun, start=1):
            assert view.result is not None
            yield ResultPage(results=(view.result,), cursor=number, end=number)
        raise AssertionError("it waits for sessions that are not its own")

    def session(self, id: str) -> SessionView:
        return next((view for view in self.begun if view.id == id), _view(id, "t"))

    def _ask(self, what: tuple[Any, ...], request_id: str) -> None:
        self.asked.append((*what, request_id))
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("the answer was lost")

    def _begin(self, names: list[tuple[str, str]], origin: Origin) -> list[SessionView]:
        self.begun = [
            _view(id, task, origin=origin, result=_result(id, task, self.status, self.report))
            for id, task in names
        ]
        return self.begun


def _view(id: str, task: str, **changes: Any) -> SessionView:
    about = {
        "id": id,
        "task_id": task,
        "run": "unnamed",
        "sample": 0,
        "attempt": 1,
        "status": SessionStatus.COMPLETED,
    }
    return SessionView(**about, created_at=0, updated_at=0, progress=Progress(), **changes)


def _result(id: str, task: str, status: SessionStatus, report: ReplayReport | None) -> SessionResult:
    has_failed = status is SessionStatus.FAILED
    return SessionResult(
        session_id=id,
        task_id=task,
        sample=0,
        attempt=1,
        status=status,
        error="no sandbox" if has_failed else None,
        verdict=None if has_failed else Verdict(reward=0.5),
        replay=report,
    )
