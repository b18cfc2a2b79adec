"""The outline of a recording leaves nothing out: every sampled token is on a path, and sums hold."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from polar.models.completion import REPLAYED, Completion
from polar.models.session import SessionResult, SessionStatus
from polar.recordings.recording import Recording
from polar.rollout.dashboard.outline import OutlinedRecording
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow
from tests.fakes.recordings import CALL, TOOL, recording
from tests.fakes.sessions import sessions


def outlined(completions: list[Completion]) -> OutlinedRecording:
    tree = grow(completions)
    trajectory = PrefixMerging(PrefixMerging.Options()).build(tree)
    result = SessionResult(
        session_id="s",
        task_id="t",
        sample=0,
        attempt=1,
        status=SessionStatus.COMPLETED,
        stats=trajectory.stats,
    )
    return OutlinedRecording(Recording(tree, trajectory, result), has_texts=False)


@given(sessions())
def test_every_sampled_token_is_on_a_path_and_counted_once(completions: list[Completion]) -> None:
    made = outlined(completions)
    outline, stats = made.outline, made.recording.result.stats
    on_paths: set[int] = set()
    for path in outline.paths:
        at = path.leaf
        while at >= 0:
            on_paths.add(at)
            at = outline.segments[at].parent
    sampled = [place for place, one in enumerate(outline.segments) if one.completion is not None]
    assert on_paths >= set(sampled)
    assert sum(outline.segments[place].tokens for place in sampled) == stats.sampled_tokens
    trained = sum(one.tokens for one in outline.segments if one.trace is not None)
    assert trained == stats.trainable_tokens == sum(line.trained_tokens for line in outline.completions)
    assert [path.trace for path in outline.paths[: stats.traces]] == list(range(stats.traces))


@given(sessions())
def test_every_completion_is_in_one_conversation(completions: list[Completion]) -> None:
    outline = outlined(completions).outline
    members = [place for one in outline.conversations for place in one.completions]
    assert sorted(members) == list(range(len(completions)))
    for place, line in enumerate(outline.completions):
        assert place in outline.conversations[line.conversation].completions
        assert line.continues is None or line.continues < place


def test_call_shows_what_is_new_to_it() -> None:
    made = OutlinedRecording(recording(), has_texts=False)
    second = made.completion(1)
    assert [message.content for message in second.messages[second.new_from :]] == [TOOL.content]
    assert made.completion(0).new_from == 0
    assert [call.name for call in made.completion(0).response.calls] == [CALL.tool_calls[0].name]


def test_calls_say_in_which_session_they_were_sampled() -> None:
    first, *others = recording().completions
    outline = outlined([replace(first, extra={REPLAYED: "other.0"}), *others]).outline
    assert [line.replayed_from for line in outline.completions] == ["other.0", None, None]
    assert outline.completions[0].trained_tokens == 0
