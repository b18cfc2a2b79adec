"""Bodies of the dashboard's routes, small enough for a page."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from polar.models.access import TokenRole
from polar.models.component import Frozen
from polar.models.policy import PolicyView
from polar.models.session import SessionEvent, SessionStatus
from polar.models.task import Id, TaskStatus
from polar.models.views import RunView, SessionHead, SessionView


class Me(Frozen):
    """The caller, as identified by its token."""

    name: str
    role: TokenRole


class NodeOverview(Frozen):
    """One node, as its reports and its leases show it."""

    name: str
    is_silent: bool = False
    is_draining: bool = False
    """Whether it gets no new sessions; it finishes the ones it has."""
    trouble: str | None = None
    """Why the node takes no more sessions for now, such as a full disk."""
    seconds_silent: float
    """Seconds since its last report."""
    version: int
    """Policy version of its engine."""
    error: str | None = None
    """Why its engine could not carry out the last policy order."""
    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """Sessions by stage."""
    places: dict[SessionStatus, int] = Field(default_factory=dict)
    """Capacity by stage; empty if not reported."""

    @property
    def state(self) -> str:
        """silent, running, troubled, draining, or drained (without sessions)."""
        if self.is_silent:
            return "silent"
        if not self.is_draining:
            return "troubled" if self.trouble else "running"
        return "draining" if self.sessions else "drained"


class NodeList(Frozen):
    nodes: tuple[NodeOverview, ...]
    """Sorted by name."""


class Minute(Frozen):
    """What ended within one minute."""

    at: float
    """Start, in Unix seconds."""
    ended: int = 0
    """Sessions that ended."""
    usable: int = 0
    """Ended sessions that completed with trainable tokens."""
    sampled_tokens: int = 0
    trainable_tokens: int = 0
    mean_reward: float | None = None
    """None if no session has a reward."""


class Overview(Frozen):
    """The fleet at a glance."""

    at: float
    sessions: dict[SessionStatus, int]
    """Sessions by status; statuses without one are absent."""
    nodes: tuple[NodeOverview, ...]
    policy: PolicyView
    minutes: tuple[Minute, ...]
    """The last hour, oldest first, including minutes without activity."""
    changes: tuple[SessionEvent, ...]
    """The latest changes of sessions, newest first."""


class SessionRow(SessionHead):
    """One line of a list of sessions."""

    harness: str | None
    reward: float | None = None
    completions: int = 0
    """Model calls so far."""
    left_at: int | None = None
    """Number of recorded calls after which an ended branch left them, in its group."""
    sampled_tokens: int = 0


class SessionRows(Frozen):
    """Sessions, newest first."""

    sessions: tuple[SessionRow, ...]
    older: str | None = None
    """Pass as `before` for the next page; None on the last."""


class TaskRow(Frozen):
    """One line of the list of tasks."""

    id: Id
    run: Id
    step: int | None = None
    """Step of the run that learned from it; None for none so far."""
    harness: str | None
    status: TaskStatus
    created_at: float
    sessions: dict[SessionStatus, int]
    rewards: tuple[float, ...]
    """Rewards of completed samples, by sample number."""


class TaskRows(Frozen):
    tasks: tuple[TaskRow, ...]
    older: str | None = None
    """Pass as `before` for the next page; None on the last."""


class SampleView(Frozen):
    """One session of a group."""

    session: SessionRow
    advantage: float | None = None
    """(reward − group mean) / standard deviation; None if all rewards are equal."""


class GroupView(Frozen):
    """A task with all its samples and branches."""

    id: Id
    run: Id
    step: int | None = None
    """Step of the run that learned from it; None for none so far."""
    status: TaskStatus
    created_at: float
    instruction: str
    harness: str
    runtime: str
    evaluator: str
    builder: str
    priority: int
    branching: str | None = None
    """The strategy that chooses where to branch; None for no branches."""
    early_stop: int | None = None
    """Usable samples after which the others are cancelled; None for never."""
    files: tuple[str, ...] = ()
    """Paths of the task's files in the workspace."""
    mean: float | None = None
    """Mean reward; None before the first."""
    standard_deviation: float | None = None
    """Standard deviation of the rewards."""
    samples: tuple[SampleView, ...]


class CompletionLine(Frozen):
    """One model call in the outline of a session."""

    index: int
    """Position in the recording, from 0."""
    id: str
    conversation: int
    """Index of its conversation."""
    lineage: str
    rule: str | None = None
    """Why it counts as a side call."""
    continues: int | None = None
    """Index of the completion whose context it continues."""
    continuation: str | None = None
    """clean, drift or rewritten."""
    dialect: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens served from the engine's prefix cache."""
    sampled_tokens: int
    trained_tokens: int
    """Sampled tokens that a trace trains."""
    version_min: int | None = None
    """Oldest policy version among its tokens; None without tokens."""
    version_max: int | None = None
    started_at: float
    first_token_at: float
    ended_at: float
    untrainable: str | None = None
    """Why it can never be trained; None if it can."""
    replayed_from: str | None = None
    """The session that sampled it; None for this one."""
    tools_called: tuple[str, ...] = ()
    excerpt: str = ""
    """The beginning of its answer."""


class ConversationLine(Frozen):
    """A chain of completions, and where it came from."""

    lineage: str
    parent: int | None = None
    """Index of the conversation that started it; None for a root."""
    completions: tuple[int, ...]
    """Indexes of its completions, in order."""


class SegmentLine(Frozen):
    """A run of tokens, which are fetched when they are displayed."""

    parent: int
    """Index of the segment it follows, -1 at the start of a context."""
    tokens: int
    """Number of tokens."""
    completion: int | None = None
    """Index of the completion that sampled it; None for prompt tokens."""
    trace: int | None = None
    """Index of the trace that trains it."""
    is_exact: bool = True
    """False if it follows other tokens than the policy saw (`drift: approximate`)."""


class PathLine(Frozen):
    """A token sequence from a root to its last segment: a trace, or an answer that no trace trains."""

    leaf: int
    """Index of its last segment."""
    lineage: str
    trace: int | None = None
    """Index of the trace; None if no trace trains it."""
    reward: float | None = None
    completion: int
    """Index of the completion that sampled the last segment."""


class Outline(Frozen):
    """A recording without its tokens and messages."""

    completions: tuple[CompletionLine, ...]
    conversations: tuple[ConversationLine, ...]
    segments: tuple[SegmentLine, ...]
    paths: tuple[PathLine, ...]
    has_texts: bool
    """Whether the model's tokenizer is on the server, to show tokens as text."""


class SessionDetail(Frozen):
    """Everything that a session's page shows first."""

    session: SessionView
    step: int | None = None
    """Step of the run that learned from its group; None for none so far."""
    instruction: str
    harness: str
    evaluator: str
    group: tuple[SessionRow, ...]
    """All samples and branches of its task."""
    events: tuple[SessionEvent, ...]
    outline: Outline | None = None
    unreadable: str | None = None
    """Why a stored recording has no outline."""


class TokenSlice(Frozen):
    """Tokens of one segment from `start` on; all lists have the same length."""

    segment: int
    """Index of the segment."""
    start: int
    """Position of the first token in the segment."""
    ids: tuple[int, ...]
    texts: tuple[str, ...] | None = None
    """None if the tokenizer is not on the server."""
    logprobs: tuple[float | None, ...] | None = None
    """None for prompt tokens."""
    versions: tuple[int, ...] | None = None
    """Policy version of each token; None for prompt tokens."""
    next: int | None = None
    """Pass as `start` for the next slice; None at the end of the segment."""


class FromRecording(Frozen):
    """A view of a recorded object, with some of its fields."""

    model_config = ConfigDict(from_attributes=True, populate_by_name=True)


class CallLine(FromRecording):
    name: str
    arguments: str


class MessageLine(FromRecording):
    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[CallLine, ...] = Field(default=(), validation_alias="tool_calls")


class ToolLine(FromRecording):
    name: str
    description: str


class CompletionDetail(Frozen):
    """One model call, as the harness made it and the model answered it."""

    index: int
    """Position in the recording, from 0."""
    messages: tuple[MessageLine, ...]
    """All messages of the request."""
    new_from: int
    """Index of the first message that the completion it continues had not seen or sampled."""
    response: MessageLine
    tools: tuple[ToolLine, ...]
    asked: dict[str, str]
    """Sampling parameters that the harness set."""
    used: dict[str, str]
    """Sampling parameters sent to the engine."""
    extra: dict[str, str]
    """Other recorded facts, by name."""


class AnswerTokens(Frozen):
    """Sampled tokens; lists that are not empty have the same length."""

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] | None = None
    """None if the tokenizer is not on the server."""
    logprobs: tuple[float | None, ...] = ()
    versions: tuple[int, ...] = ()
    """Policy version of each token."""


class WatchedCall(AnswerTokens):
    """A model call that has ended, as whoever watches the session is told of it."""

    kind: Literal["call"] = "call"
    index: int
    """Position in the recording, from 0."""
    id: str
    continues: int | None = None
    """Index of the completion whose context it continues."""
    dialect: str
    finish_reason: str
    prompt_tokens: int
    given_tokens: int
    """Prompt tokens that the completion it continues had not seen or sampled."""
    started_at: float
    first_token_at: float
    ended_at: float
    untrainable: str | None = None
    """Why it can never be trained; None if it can."""
    replayed_from: str | None = None
    """The session that sampled it; None for this one."""
    messages: tuple[MessageLine, ...]
    """Messages that the completion it continues had not seen or sampled."""
    response: MessageLine


class WatchedSession(Frozen):
    """The state of a watched session; the last event is that of a session with a result."""

    kind: Literal["session"] = "session"
    session: SessionView


class WatchRestart(Frozen):
    """What was told of model calls before is void; all of them are told anew."""

    kind: Literal["restart"] = "restart"


WatchEvent = Annotated[WatchedSession | WatchedCall | WatchRestart, Field(discriminator="kind")]
"""What whoever watches a session is told."""


class ArtifactLine(Frozen):
    name: str
    """Path within the archive."""
    size: int
    """Size in bytes."""


class ArtifactList(Frozen):
    files: tuple[ArtifactLine, ...]


class ArtifactText(Frozen):
    """One kept file, as far as it is text."""

    name: str
    text: str | None
    """None if the file is not text."""
    is_cut: bool = False
    """Whether the text is truncated."""


class RunCurves(Frozen):
    """A run's numbers over its steps, and its rewards over time."""

    run: RunView
    steps: tuple[int, ...]
    """Steps with numbers; of a long run some of them."""
    series: dict[str, tuple[float | None, ...]]
    """Values at each of `steps`, by metric."""
    hours: tuple[float, ...]
    """Hours since the run began, the ends of equal spans in which sessions completed."""
    rewards: tuple[float, ...]
    """Mean reward in each of these spans."""
