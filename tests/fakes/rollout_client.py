"""A rollout server as a trainer sees it: tasks end in the order they came, scored by a script."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from polar.errors import NotFound, Unavailable
from polar.models.session import SessionResult
from polar.models.task import TaskSpec
from polar.models.views import ResultPage
from polar.training.groups import Group
from tests.fakes.recordings import encoded
from tests.fakes.scripted_rollouts import group

ANSWERS = ([[10, 11, 12]], [[20, 21]])
REWARDS = (1.0, 0.0)


class RolloutClient:
    """Every submitted task is a group of two sessions whose results are in the feed at once."""

    def __init__(self) -> None:
        self.submitted: list[TaskSpec] = []
        self.feed: list[SessionResult] = []
        self.groups: dict[str, Group] = {}
        self.equal: set[str] = set()
        """How the ids of tasks end whose sessions are all rewarded alike."""
        self.asked: list[str] = []
        """Sessions whose recordings were read."""
        self.lost: set[str] = set()
        """Sessions whose recording is gone."""
        self.failures = 0
        """How many of the next requests find no server."""

    def submit(self, task: TaskSpec) -> None:
        self._answer()
        if task.id in self.groups:
            return
        self.submitted.append(task)
        rewards = (1.0, 1.0) if task.id.endswith(tuple(self.equal)) else REWARDS
        self.groups[task.id] = group(ANSWERS, rewards, task_id=task.id, prompt=(1, 2, len(self.submitted)))
        # Of the second task of each pair the sessions end first.
        results = [one.result for one in self.groups[task.id].samples]
        at = len(self.feed) if len(self.submitted) % 2 else max(0, len(self.feed) - 1)
        self.feed[at:at] = results

    def result_pages(
        self, task_ids: Collection[str], *, cursor: int = 0, follow: bool = False
    ) -> Iterator[ResultPage]:
        self._answer()
        while cursor < len(self.feed):
            result = self.feed[cursor]
            cursor += 1
            yield ResultPage(results=(result,) if result.task_id in task_ids else (), cursor=cursor)

    def wait(self, task_ids: Collection[str]) -> list[SessionResult]:
        self._answer()
        return [one.result for id in task_ids for one in self.groups[id].samples]

    def recording(self, session_id: str) -> bytes:
        self._answer()
        self.asked.append(session_id)
        if session_id in self.lost:
            raise NotFound(f"session {session_id} has no recording")
        samples = [one for each in self.groups.values() for one in each.samples]
        (found,) = (one.recording for one in samples if one.result.session_id == session_id)
        assert found is not None
        return encoded(found)

    def _answer(self) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("the server cannot be reached")
