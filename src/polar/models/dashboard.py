"""What the dashboard reads of the control plane: the bodies of its routes, small enough for a page."""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field

from polar.models.access import TokenRole
from polar.models.component import Frozen
from polar.models.policy import PolicyView
from polar.models.session import SessionEvent, SessionStatus
from polar.models.task import Id, TaskStatus
from polar.models.views import SessionHead, SessionView


class Me(Frozen):
    """Who the caller's token says they are."""

    name: str
    """The token's."""
    role: TokenRole


class NodeOverview(Frozen):
    """One node, as its reports and its leases show it."""

    name: str
    """As it joined."""
    is_silent: bool = False
    """Whether it has not reported within the time in which nodes do."""
    is_draining: bool = False
    """Whether it is leased nothing more, and finishes what it holds."""
    trouble: str | None = None
    """Why it takes no more sessions for now, by its own account: its disk is short, or everything fails."""
    seconds_silent: float
    """Since its last report."""
    version: int
    """Of the policy that its engine samples with."""
    error: str | None = None
    """Why its engine could not do what was asked of it."""
    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """What it holds, by stage."""
    places: dict[SessionStatus, int] = Field(default_factory=dict)
    """How many sessions each stage takes at once; empty where the node has not said."""

    @property
    def state(self) -> str:
        """In a word: silent, running, troubled, draining, or drained once it holds nothing."""
        if self.is_silent:
            return "silent"
        if not self.is_draining:
            return "troubled" if self.trouble else "running"
        return "draining" if self.sessions else "drained"


class NodeList(Frozen):
    nodes: tuple[NodeOverview, ...]
    """By name."""


class Minute(Frozen):
    """What ended within one minute."""

    at: float
    """When it began, Unix seconds."""
    ended: int = 0
    """Sessions."""
    usable: int = 0
    """Of the ended: completed with trainable tokens."""
    sampled_tokens: int = 0
    """In those sessions."""
    trainable_tokens: int = 0
    """Of the sampled."""
    mean_reward: float | None = None
    """Over those that have a reward; None: none has."""


class Overview(Frozen):
    """The fleet at a glance."""

    at: float
    """When it was counted, Unix seconds."""
    sessions: dict[SessionStatus, int]
    """How many sessions there are in each status; statuses without one are absent."""
    nodes: tuple[NodeOverview, ...]
    policy: PolicyView
    minutes: tuple[Minute, ...]
    """The last hour, oldest first, minutes without anything included."""
    changes: tuple[SessionEvent, ...]
    """The latest changes of sessions, newest first."""


class Reward(StrEnum):
    """What the reward of sessions that are looked for is to be."""

    POSITIVE = "positive"
    """More than 0."""
    ZERO = "zero"
    """Or less."""
    NONE = "none"
    """There is none."""


class SessionRow(SessionHead):
    """One line of a list of sessions."""

    reward: float | None = None
    """Once it has one."""
    completions: int = 0
    """Model calls so far."""
    left_at: int | None = None
    """Of a branch that has ended, in its group: after how many of the recorded calls it truly left."""
    sampled_tokens: int = 0
    """So far."""


class SessionRows(Frozen):
    """Sessions, the newest first."""

    sessions: tuple[SessionRow, ...]
    older: str | None = None
    """Pass as `before` to get the page after this one; None on the last."""


class TaskRow(Frozen):
    """One line of the list of tasks."""

    id: Id
    """The task's."""
    harness: str | None
    """Its name."""
    status: TaskStatus
    """Derived from the task's sessions."""
    created_at: float
    """Unix seconds."""
    sessions: dict[SessionStatus, int]
    """How many are in each status."""
    rewards: tuple[float, ...]
    """Of the completed samples, in their order."""


class TaskRows(Frozen):
    tasks: tuple[TaskRow, ...]
    older: str | None = None
    """Pass as `before` to get the page after this one; None on the last."""


class SampleView(Frozen):
    """One session of a group."""

    session: SessionRow
    advantage: float | None = None
    """Its reward against the group's mean, in standard deviations; None where all are equal."""


class GroupView(Frozen):
    """All samples and branches of one task, with what was asked."""

    id: Id
    """The task's."""
    status: TaskStatus
    """Derived from the task's sessions."""
    created_at: float
    """Unix seconds."""
    instruction: str
    """What was asked."""
    harness: str
    """Its name, as of the next three."""
    runtime: str
    """The sandbox's kind."""
    evaluator: str
    """What scores."""
    builder: str
    """What makes traces."""
    priority: int
    """0 to 100, higher first."""
    branching: str | None = None
    """What chooses where branches leave its sessions; None: nothing does."""
    early_stop: int | None = None
    """The number of usable samples after which the others are cancelled; None: never."""
    files: tuple[str, ...] = ()
    """Paths that were put into the workspace."""
    mean: float | None = None
    """Of the rewards; None: there is none yet."""
    standard_deviation: float | None = None
    """Of the rewards."""
    samples: tuple[SampleView, ...]


class CompletionLine(Frozen):
    """One model call in the outline of a session."""

    index: int
    """Its place in the recording, from 0."""
    id: str
    """The completion's."""
    conversation: int
    """Index of its conversation."""
    lineage: str
    """main, subagent, compacted, summary or auxiliary."""
    rule: str | None = None
    """Why it is taken for a side call."""
    continues: int | None = None
    """Index of the completion whose context its prompt goes on from."""
    continuation: str | None = None
    """clean, drift or rewritten."""
    dialect: str
    """What the harness spoke."""
    finish_reason: str
    """Why sampling ended."""
    prompt_tokens: int
    """All that it conditioned on."""
    cached_tokens: int
    """Of these, what came out of the engine's prefix cache."""
    sampled_tokens: int
    """All that it sampled."""
    trained_tokens: int
    """Of these, those that some trace trains."""
    version_min: int | None = None
    """Oldest policy that sampled a token of it; None: it has none."""
    version_max: int | None = None
    """Newest."""
    started_at: float
    """When the request came, Unix seconds."""
    first_token_at: float
    """Unix seconds."""
    ended_at: float
    """Unix seconds."""
    untrainable: str | None = None
    """Why it can never be trained; None: it can."""
    replayed_from: str | None = None
    """The session in which it was sampled; None: this one."""
    tools_called: tuple[str, ...] = ()
    """Names, in order."""
    excerpt: str = ""
    """How its answer begins."""


class ConversationLine(Frozen):
    """A chain of completions, and where it came from."""

    lineage: str
    """main, subagent, compacted, summary or auxiliary."""
    parent: int | None = None
    """Index of the conversation that it came out of; None: of none."""
    completions: tuple[int, ...]
    """Indexes of its completions, in order."""


class SegmentLine(Frozen):
    """A run of tokens; its tokens are fetched when they are looked at."""

    parent: int
    """Index of the segment it follows, -1 at the start of a context."""
    tokens: int
    """How many."""
    completion: int | None = None
    """Index of the completion that sampled it; None: it was given to the policy."""
    trace: int | None = None
    """Which trace trains it."""
    is_exact: bool = True
    """False where it stands after other tokens than the policy saw (`drift: approximate`)."""


class PathLine(Frozen):
    """A token sequence from a root to its last segment: a trace, or an answer that no trace trains."""

    leaf: int
    """Its last segment."""
    lineage: str
    """main, subagent, compacted, summary or auxiliary."""
    trace: int | None = None
    """Index of the trace; None: no trace trains it."""
    reward: float | None = None
    """The trace's."""
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
    """The task's."""
    harness: str
    """Its name."""
    evaluator: str
    """Its name."""
    group: tuple[SessionRow, ...]
    """All samples and branches of its task."""
    events: tuple[SessionEvent, ...]
    outline: Outline | None = None
    unreadable: str | None = None
    """Why there is no outline although there is a recording."""


class TokenSlice(Frozen):
    """Tokens of one segment from `start` on; the lists that there are have one length."""

    segment: int
    """Index of the segment."""
    start: int
    """Of the first token, within the segment."""
    ids: tuple[int, ...]
    """Token ids."""
    texts: tuple[str, ...] | None = None
    """None: the tokenizer is not on the server."""
    logprobs: tuple[float | None, ...] | None = None
    """None: the segment was given to the policy, not sampled."""
    versions: tuple[int, ...] | None = None
    """Of the policy that sampled each; None as above."""
    next: int | None = None
    """Pass as `start` to get what follows; None at the segment's end."""


class FromRecording(Frozen):
    """Shows the fields that it has of something recorded."""

    model_config = ConfigDict(from_attributes=True)


class CallLine(FromRecording):
    name: str
    """The tool's."""
    arguments: str
    """As the model wrote them."""


class MessageLine(FromRecording):
    role: str
    """system, user, assistant or tool."""
    content: str
    """Its text."""
    reasoning: str | None = None
    """What was thought before it; None: nothing."""
    calls: tuple[CallLine, ...] = Field(default=(), validation_alias="tool_calls")
    """Tools that it calls."""


class ToolLine(FromRecording):
    name: str
    """As the model calls it."""
    description: str
    """As the harness described it."""


class CompletionDetail(Frozen):
    """One model call as the harness made it and the model answered it."""

    index: int
    """Its place in the recording, from 0."""
    messages: tuple[MessageLine, ...]
    """The whole request."""
    new_from: int
    """Which message is the first that the completion it continues had not seen or said."""
    response: MessageLine
    """What was sampled, parsed."""
    tools: tuple[ToolLine, ...]
    """What the model was offered."""
    asked: dict[str, str]
    """Sampling as the harness asked for it; what it did not ask for is absent."""
    used: dict[str, str]
    """Sampling as the engine was asked for it."""
    extra: dict[str, str]
    """What else was recorded with it."""


class ArtifactLine(Frozen):
    name: str
    """Path within the archive."""
    size: int
    """Bytes."""


class ArtifactList(Frozen):
    files: tuple[ArtifactLine, ...]
    """By name."""


class ArtifactText(Frozen):
    """One kept file as far as it is text."""

    name: str
    """Path within the archive."""
    text: str | None
    """None: it is not text."""
    is_cut: bool = False
    """Whether it goes on."""


class RunLine(Frozen):
    """A training run whose numbers are below `server.runs_dir`."""

    name: str
    """Path of its directory below `server.runs_dir`."""
    steps: int
    """How many have numbers."""
    updated_at: float
    """When its numbers were last written, Unix seconds."""
    latest: dict[str, float]
    """The numbers of its last step."""


class RunList(Frozen):
    runs: tuple[RunLine, ...]
    is_configured: bool
    """Whether `server.runs_dir` is set."""


class RunCurves(Frozen):
    name: str
    """Path of its directory below `server.runs_dir`."""
    steps: tuple[int, ...]
    """Those shown, in order."""
    series: dict[str, tuple[float | None, ...]]
    """Name of a number → its value at each of `steps`."""
