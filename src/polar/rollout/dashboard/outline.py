"""A recording as the session page shows it: who continues whom, which tokens are trained, what was said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

from polar.errors import NotFound
from polar.models.chat import Sampling
from polar.models.completion import REPLAYED, Completion
from polar.models.component import view
from polar.models.dashboard import (
    CompletionDetail,
    CompletionLine,
    ConversationLine,
    Outline,
    PathLine,
    SegmentLine,
    WatchedCall,
)
from polar.models.trace import Segment
from polar.recordings.recording import Recording
from polar.recordings.tree import Link
from polar.trajectory.lineage import trace_ancestry

EXCERPT = 160
"""Characters of an answer that its line shows."""


class OutlinedRecording:
    """A decoded recording with everything that is worked out of it once."""

    def __init__(self, recording: Recording, *, has_texts: bool) -> None:
        self.recording = recording
        self._places = {completion.id: place for place, completion in enumerate(recording.completions)}
        self._ancestry = trace_ancestry(recording.tree)
        traces = recording.trajectory.traces
        self._trace_of = {index: trace for trace, ref in enumerate(traces) for index in ref.trained}
        self.outline = Outline(
            completions=self._completions(),
            conversations=tuple(
                ConversationLine(
                    lineage=self._ancestry.lineage(one.first),
                    parent=one.parent,
                    completions=tuple(one.members),
                )
                for one in self._ancestry.conversations
            ),
            segments=tuple(
                self._segment(place, one) for place, one in enumerate(recording.trajectory.segments)
            ),
            paths=self._paths(),
            has_texts=has_texts,
        )

    def segment(self, index: int) -> Segment:
        segments = self.recording.trajectory.segments
        if not 0 <= index < len(segments):
            raise NotFound(f"the recording has no segment {index}")
        return segments[index]

    def completion(self, index: int) -> CompletionDetail:
        """One model call with all that was said."""
        recording = self.recording
        if not 0 <= index < len(recording.completions):
            raise NotFound(f"the recording has no completion {index}")
        completion, continued = recording.completions[index], recording.tree.links[index].continues
        before = None if continued is None else recording.completions[continued]
        return view(
            CompletionDetail,
            completion,
            index=index,
            new_from=_new_from(completion, before),
            asked=_sampling(completion.asked),
            used=_sampling(completion.used),
        )

    def _completions(self) -> tuple[CompletionLine, ...]:
        segments = self.recording.trajectory.segments
        trained: Counter[str | None] = Counter()
        for index in self._trace_of:
            trained[segments[index].completion_id] += len(segments[index].ids)
        return tuple(
            self._line(place, completion, trained[completion.id])
            for place, completion in enumerate(self.recording.completions)
        )

    def _line(self, place: int, completion: Completion, trained: int) -> CompletionLine:
        link, versions = self.recording.tree.links[place], completion.policy_versions
        said = completion.response.content or completion.response.reasoning or ""
        return view(
            CompletionLine,
            completion,
            index=place,
            conversation=self._ancestry.of[place],
            lineage=self._ancestry.lineage(place),
            rule=self._ancestry.rules[place],
            continues=link.continues,
            continuation=link.kind,
            trained_tokens=trained,
            replayed_from=completion.extra.get(REPLAYED),
            version_min=int(versions.min()) if len(versions) else None,
            version_max=int(versions.max()) if len(versions) else None,
            tools_called=tuple(call.name for call in completion.response.tool_calls),
            excerpt=" ".join(said[: 4 * EXCERPT].split())[:EXCERPT],
        )

    def _segment(self, place: int, segment: Segment) -> SegmentLine:
        name = segment.completion_id
        return SegmentLine(
            parent=segment.parent,
            tokens=len(segment.ids),
            completion=self._places[name] if name is not None else None,
            trace=self._trace_of.get(place),
            is_exact=segment.exact,
        )

    def _paths(self) -> tuple[PathLine, ...]:
        """The traces, then every answer that is on the way of none."""
        trajectory = self.recording.trajectory
        paths = [
            PathLine(
                leaf=ref.trained[-1],
                lineage=ref.lineage,
                trace=trace,
                reward=ref.reward,
                completion=self._places[trajectory.segments[ref.trained[-1]].completion_id or ""],
            )
            for trace, ref in enumerate(trajectory.traces)
        ]
        shown: set[int] = set()
        for path in paths:
            _walk(trajectory.segments, path.leaf, shown)
        # From the last one back, so that one that others follow is shown with them.
        alone = []
        for index in range(len(trajectory.segments) - 1, -1, -1):
            name = trajectory.segments[index].completion_id
            if name is not None and index not in shown:
                _walk(trajectory.segments, index, shown)
                place = self._places[name]
                alone.append(PathLine(leaf=index, lineage=self._ancestry.lineage(place), completion=place))
        return (*paths, *reversed(alone))


def watched_call(
    at: Callable[[int], tuple[Completion, Link]], place: int, texts: Callable[[list[int]], list[str]] | None
) -> WatchedCall:
    """One model call as whoever watches its session is told of it; `at` is that of its tree."""
    completion, link = at(place)
    continued = None if link.continues is None else at(link.continues)[0]
    ids = completion.sampled_ids.tolist()
    return view(
        WatchedCall,
        completion,
        index=place,
        continues=link.continues,
        given_tokens=link.given,
        replayed_from=completion.extra.get(REPLAYED),
        messages=completion.messages[_new_from(completion, continued) :],
        ids=ids,
        texts=texts(ids) if texts is not None else None,
        logprobs=tuple(map(finite, completion.logprobs.tolist())),
        versions=completion.policy_versions.tolist(),
    )


def _new_from(completion: Completion, continued: Completion | None) -> int:
    """The messages before it were in the request that this one continues, or were its answer."""
    seen = len(continued.messages) + 1 if continued is not None else 0
    return seen if seen <= len(completion.messages) else 0


def _walk(segments: tuple[Segment, ...], leaf: int, shown: set[int]) -> None:
    """Add the path that ends in `leaf`, as far as it is not known."""
    while leaf >= 0 and leaf not in shown:
        shown.add(leaf)
        leaf = segments[leaf].parent


def _sampling(sampling: Sampling) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(sampling).items() if value not in (None, ())}


def finite(value: float) -> float | None:
    """JSON has no other numbers; a recording that was damaged may."""
    return float(value) if math.isfinite(value) else None
