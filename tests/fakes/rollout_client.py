"""A rollout server as a trainer sees it: tasks end nearly in the order they came, scored by a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Self

from polar.errors import NotFound, Unavailable
from polar.models.session import SessionResult, SessionStatus
from polar.models.task import TaskSpec, TaskStatus
from polar.models.views import ResultPage, TaskBatchView, TaskView
from polar.trajectory.learnable import Group
from tests.fakes.recordings import encoded
from tests.fakes.scripted_rollouts import group

ANSWERS: tuple[list[list[int]], ...] = ([[10, 11, 12]], [[20, 21]])
BRANCH = [[20, 22]]
REWARDS: tuple[float, ...] = (1.0, 0.0)
SLOW = 5
"""How many tasks are submitted before a slow one ends."""


class RolloutClient:
    """Every submitted task is a group of two sessions, whose results are in the feed soon."""

    def __init__(self) -> None:
        self.submitted: list[TaskSpec] = []
        self.feed: list[SessionResult] = []
        self.groups: dict[str, Group] = {}
        self.equal: set[str] = set()
        """How the ids of tasks end whose sessions are all rewarded alike."""
        self.asked: list[str] = []
        """Sessions whose recordings were read."""
        self.slow: set[str] = set()
        """How the ids of tasks end that take longer than those after them."""
        self._running: list[tuple[int, SessionResult]] = []
        """Until how many tasks are submitted, if nobody waits for it."""
        self.cursors: list[int] = []
        """Where the feed was read from, each time."""
        self.branching: set[str] = set()
        """How the ids of tasks end that get a branch when their samples have ended."""
        self.lost: set[str] = set()
        """Sessions whose recording is gone."""
        self.all_are_stale = False
        """Whether the server names every result as one of a policy too old."""
        self.breaks_off = False
        """Whether the server goes away after each result, and comes back with what it had."""
        self.failures = 0
        """How many of the next requests find no server."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def submit(self, task: TaskSpec) -> TaskView:
        self._answer()
        if task.id in self.groups:
            return TaskView(spec=task, status=TaskStatus.FINISHED, created_at=0.0)
        self.submitted.append(task)
        rewards = (1.0, 1.0) if task.id.endswith(tuple(self.equal)) else REWARDS
        answers = ANSWERS
        number = len(self.submitted)
        if task.id.endswith(tuple(self.branching)):
            answers, rewards = (*ANSWERS, BRANCH), (*rewards, 1.0)
        self.groups[task.id] = group(answers, rewards, task_id=task.id, prompt=(1, 2, number))
        results = [one.result for one in self.groups[task.id].samples]
        branches = results[len(ANSWERS) :]
        del results[len(ANSWERS) :]
        if task.id.endswith(tuple(self.slow)):
            self._running += [(number + SLOW, result) for result in results]
        else:
            # Of the second task of each pair the sessions end first.
            self._running.append((number + number % 2, results.pop()))
            self.feed += results
        self._running += [(number + 2, result) for result in branches]
        for due in [one for one in self._running if one[0] <= number]:
            self._end(due)
        return TaskView(spec=task, status=TaskStatus.QUEUED, created_at=0.0)

    async def submit_batches(self, tasks: Sequence[TaskSpec]) -> AsyncIterator[TaskBatchView]:
        known = tuple(task.id for task in tasks if task.id in self.groups)
        yield TaskBatchView(tasks=tuple([await self.submit(task) for task in tasks]), known=known)

    async def task(self, id: str) -> TaskView:
        self._answer()
        ended = Counter(result.status for result in self.feed if result.task_id == id)
        unended = len(self.groups[id].samples) - ended.total()
        sessions = ended + Counter({SessionStatus.RUNNING: unended})
        (spec,) = (task for task in self.submitted if task.id == id)
        status = TaskStatus.RUNNING if unended else TaskStatus.FINISHED
        return TaskView(spec=spec, status=status, created_at=0.0, sessions=sessions)

    async def newest_result(self) -> int:
        self._answer()
        return len(self.feed)

    async def result_pages(
        self, task_ids: Collection[str], *, cursor: int = 0, follow: bool = False
    ) -> AsyncIterator[ResultPage]:
        self._answer()
        self.cursors.append(cursor)
        while True:
            if cursor < len(self.feed):
                result = self.feed[cursor]
                cursor += 1
                if result.task_id in task_ids:
                    stale = (result.session_id,) if self.all_are_stale else ()
                    yield ResultPage(results=(result,), cursor=cursor, end=len(self.feed), stale=stale)
                    if self.breaks_off:
                        raise Unavailable("the server has gone away")
            elif self._running:
                self._end(self._running[0])
            else:
                return

    async def recording(self, session_id: str) -> bytes:
        self._answer()
        self.asked.append(session_id)
        if session_id in self.lost:
            raise NotFound(f"session {session_id} has no recording")
        samples = [one for each in self.groups.values() for one in each.samples]
        (found,) = (one.recording for one in samples if one.result.session_id == session_id)
        assert found is not None
        return encoded(found)

    def _end(self, one: tuple[int, SessionResult]) -> None:
        self._running.remove(one)
        self.feed.append(one[1])

    def _answer(self) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("the server cannot be reached")


class ReversingClient(RolloutClient):
    """The scripted server, whose results come in the opposite order."""

    async def result_pages(
        self, task_ids: Collection[str], *, cursor: int = 0, follow: bool = False
    ) -> AsyncIterator[ResultPage]:
        pages = super().result_pages(task_ids, cursor=cursor, follow=follow)
        for page in reversed([one async for one in pages]):
            yield page
