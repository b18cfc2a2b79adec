"""A recording as the session page shows it: who continues whom, which tokens are trained, what was said."""

from __future__ import annotations

import math
from dataclasses import asdict

from polar.errors import NotFound
from polar.models.chat import Message, Sampling
from polar.models.completion import Completion
from polar.models.dashboard import (
    CallLine,
    CompletionDetail,
    CompletionLine,
    ConversationLine,
    MessageLine,
    Outline,
    PathLine,
    SegmentLine,
    ToolLine,
)
from polar.models.trace import Lineage, Segment
from polar.recordings.recording import Recording
from polar.trajectory.lineage import Ancestry, trace_ancestry

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
            conversations=_conversations(self._ancestry),
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
        completion = recording.completions[index]
        return CompletionDetail(
            index=index,
            messages=tuple(map(_message, completion.messages)),
            new_from=self._new_from(completion, recording.tree.links[index].continues),
            response=_message(completion.response),
            tools=tuple(ToolLine(name=tool.name, description=tool.description) for tool in completion.tools),
            asked=_sampling(completion.asked),
            used=_sampling(completion.used),
            extra=completion.extra,
        )

    def _new_from(self, completion: Completion, continued: int | None) -> int:
        """The messages before it were in the request that this one continues, or were its answer."""
        if continued is None:
            return 0
        seen = len(self.recording.completions[continued].messages) + 1
        return seen if seen <= len(completion.messages) else 0

    def _completions(self) -> tuple[CompletionLine, ...]:
        segments = self.recording.trajectory.segments
        trained: dict[str, int] = {}
        for index in self._trace_of:
            name = segments[index].completion_id or ""
            trained[name] = trained.get(name, 0) + len(segments[index].ids)
        return tuple(
            self._line(place, completion, trained.get(completion.id, 0))
            for place, completion in enumerate(self.recording.completions)
        )

    def _line(self, place: int, completion: Completion, trained: int) -> CompletionLine:
        link, rule = self.recording.tree.links[place], self._ancestry.rules[place]
        versions = completion.policy_versions
        said = completion.response.content or completion.response.reasoning or ""
        return CompletionLine(
            index=place,
            id=completion.id,
            conversation=self._ancestry.of[place],
            lineage=self._ancestry.lineage(place),
            rule=rule,
            continues=link.continues,
            continuation=link.kind,
            dialect=completion.dialect,
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            sampled_tokens=completion.sampled_tokens,
            trained_tokens=trained,
            version_min=int(versions.min()) if len(versions) else None,
            version_max=int(versions.max()) if len(versions) else None,
            started_at=completion.started_at,
            first_token_at=completion.first_token_at,
            ended_at=completion.ended_at,
            untrainable=completion.untrainable,
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
                lineage: Lineage = self._ancestry.lineage(place)
                alone.append(PathLine(leaf=index, lineage=lineage, completion=place))
        return (*paths, *reversed(alone))


def _walk(segments: tuple[Segment, ...], leaf: int, shown: set[int]) -> None:
    """Add the path that ends in `leaf`, as far as it is not known."""
    while leaf >= 0 and leaf not in shown:
        shown.add(leaf)
        leaf = segments[leaf].parent


def _conversations(ancestry: Ancestry) -> tuple[ConversationLine, ...]:
    return tuple(
        ConversationLine(
            lineage=ancestry.lineage(one.first), parent=one.parent, completions=tuple(one.members)
        )
        for one in ancestry.conversations
    )


def _message(message: Message) -> MessageLine:
    return MessageLine(
        role=message.role,
        content=message.content,
        reasoning=message.reasoning,
        calls=tuple(CallLine(name=call.name, arguments=call.arguments) for call in message.tool_calls),
    )


def _sampling(sampling: Sampling) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(sampling).items() if value not in (None, ())}


def finite(value: float) -> float | None:
    """JSON has no other numbers; a recording that was damaged may."""
    return float(value) if math.isfinite(value) else None
