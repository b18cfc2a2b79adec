"""What the dashboard reads of the control plane: the bodies of its routes, small enough for a page."""

from __future__ import annotations

from pydantic import Field

from polar.models.access import Role
from polar.models.component import Frozen
from polar.models.policy import PolicyView
from polar.models.session import SessionEvent, SessionStatus
from polar.models.task import Id, TaskStatus
from polar.models.views import SessionView


class Me(Frozen):
    """Who the caller's token says they are."""

    name: str
    role: Role


class NodeOverview(Frozen):
    """One node, as its reports and its leases show it."""

    name: str
    is_alive: bool
    """Whether it has reported within the time in which nodes do."""
    seconds_silent: float
    version: int
    """Of the policy that its engine samples with."""
    error: str | None = None
    """Why its engine could not do what was asked of it."""
    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """What it holds, by stage."""


class Minute(Frozen):
    """What ended within one minute."""

    at: float
    """When it began, Unix seconds."""
    ended: int = 0
    usable: int = 0
    """Of the ended: completed with trainable tokens."""
    sampled_tokens: int = 0
    trainable_tokens: int = 0
    mean_reward: float | None = None


class Overview(Frozen):
    """The fleet at a glance."""

    at: float
    sessions: dict[SessionStatus, int]
    """How many sessions there are in each status; statuses without one are absent."""
    nodes: tuple[NodeOverview, ...]
    policy: PolicyView
    minutes: tuple[Minute, ...]
    """The last hour, oldest first, minutes without anything included."""
    changes: tuple[SessionEvent, ...]
    """The latest changes of sessions, newest first."""


class SessionRow(Frozen):
    """One line of a list of sessions."""

    id: Id
    task_id: Id
    sample: int
    status: SessionStatus
    attempt: int
    node: str | None = None
    reward: float | None = None
    completions: int = 0
    sampled_tokens: int = 0
    created_at: float
    updated_at: float


class SessionRows(Frozen):
    """Sessions, the newest first."""

    sessions: tuple[SessionRow, ...]
    older: str | None = None
    """Pass as `before` to get the page after this one; None on the last."""


class TaskRow(Frozen):
    """One line of the list of tasks."""

    id: Id
    harness: str | None
    status: TaskStatus
    created_at: float
    sessions: dict[SessionStatus, int]
    rewards: tuple[float, ...]
    """Of the completed samples, in their order."""


class TaskRows(Frozen):
    tasks: tuple[TaskRow, ...]
    older: str | None = None


class Sample(Frozen):
    """One session of a group."""

    session: SessionRow
    advantage: float | None = None
    """Its reward against the group's mean, in standard deviations; None where the group has no spread."""


class Group(Frozen):
    """All samples of one task, with what was asked."""

    id: Id
    status: TaskStatus
    created_at: float
    instruction: str
    harness: str
    runtime: str
    evaluator: str
    builder: str
    priority: int
    early_stop: int | None = None
    files: tuple[str, ...] = ()
    mean: float | None = None
    spread: float | None = None
    """The rewards' standard deviation."""
    samples: tuple[Sample, ...]


class CompletionLine(Frozen):
    """One model call in the outline of a session."""

    index: int
    id: str
    conversation: int
    lineage: str
    """main, subagent, compacted or auxiliary."""
    rule: str | None = None
    """Why it is taken for a side call."""
    continues: int | None = None
    """Index of the completion whose context its prompt goes on from."""
    continuation: str | None = None
    """clean, drift or rewritten."""
    dialect: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    trained_tokens: int
    version_min: int | None = None
    version_max: int | None = None
    started_at: float
    first_token_at: float
    ended_at: float
    untrainable: str | None = None
    tools_called: tuple[str, ...] = ()
    excerpt: str = ""
    """How its answer begins."""


class ConversationLine(Frozen):
    """A chain of completions, and where it came from."""

    lineage: str
    parent: int | None = None
    completions: tuple[int, ...]


class SegmentLine(Frozen):
    """A run of tokens; its tokens are fetched when they are looked at."""

    parent: int
    """Index of the segment it follows, -1 at the start of a context."""
    tokens: int
    completion: int | None = None
    """Index of the completion that sampled it; None: it was given to the policy."""
    trace: int | None = None
    """Which trace trains it."""
    is_exact: bool = True


class PathLine(Frozen):
    """A token sequence from a root to its last segment: a trace, or an answer that no trace trains."""

    leaf: int
    """Its last segment."""
    lineage: str
    trace: int | None = None
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
    """Whether the model's tokenizer is on the server, so that tokens can be shown as text."""


class SessionDetail(Frozen):
    """Everything a session's page begins with."""

    session: SessionView
    instruction: str
    harness: str
    evaluator: str
    group: tuple[SessionRow, ...]
    """All samples of its task."""
    events: tuple[SessionEvent, ...]
    outline: Outline | None = None
    unreadable: str | None = None
    """Why there is no outline although there is a recording."""


class TokenSlice(Frozen):
    """Tokens of one segment from `start` on; the lists that there are have one length."""

    segment: int
    start: int
    ids: tuple[int, ...]
    texts: tuple[str, ...] | None = None
    logprobs: tuple[float | None, ...] | None = None
    versions: tuple[int, ...] | None = None
    next: int | None = None
    """Pass as `start` to get what follows; None at the segment's end."""


class CallLine(Frozen):
    name: str
    arguments: str


class MessageLine(Frozen):
    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[CallLine, ...] = ()


class ToolLine(Frozen):
    name: str
    description: str


class CompletionDetail(Frozen):
    """One model call as the harness made it and the model answered it."""

    index: int
    messages: tuple[MessageLine, ...]
    new_from: int
    """Which message is the first that the completion it continues had not seen or said."""
    response: MessageLine
    tools: tuple[ToolLine, ...]
    asked: dict[str, str]
    """Sampling as the harness asked for it; what it did not ask for is absent."""
    used: dict[str, str]
    """Sampling as the engine was asked for it."""
    extra: dict[str, str]


class ArtifactLine(Frozen):
    name: str
    size: int


class ArtifactList(Frozen):
    files: tuple[ArtifactLine, ...]


class ArtifactText(Frozen):
    """One kept file as far as it is text."""

    name: str
    text: str | None
    """None: it is not text."""
    is_cut: bool = False
    """Whether it goes on."""


class RunLine(Frozen):
    """A training run whose numbers are below `server.runs_dir`."""

    name: str
    steps: int
    updated_at: float
    latest: dict[str, float]
    """The numbers of its last step."""


class RunList(Frozen):
    runs: tuple[RunLine, ...]
    is_configured: bool
    """Whether `server.runs_dir` is set."""


class RunCurves(Frozen):
    name: str
    steps: tuple[int, ...]
    series: dict[str, tuple[float | None, ...]]
    """Name of a number → its value at each of `steps`."""
