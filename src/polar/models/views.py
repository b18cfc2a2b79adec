"""Bodies of the control plane's REST API."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from polar.models.component import Frozen
from polar.models.session import (
    Lease,
    LeaseKey,
    Origin,
    Progress,
    SessionEvent,
    SessionResult,
    SessionStatus,
    StageEntry,
)
from polar.models.task import BudgetScope, Id, OnDivergence, RunKind, TaskSpec, TaskStatus, WebhookEvent


class Reward(StrEnum):
    """Filters sessions by reward."""

    POSITIVE = "positive"
    """Above 0."""
    ZERO = "zero"
    """0 or less."""
    NONE = "none"
    """There is none."""


class TaskView(Frozen):
    """A stored task and the progress of its sessions."""

    spec: TaskSpec
    status: TaskStatus
    """Derived from the task's sessions."""
    created_at: float
    """Unix seconds."""
    step: int | None = None
    """Step of its run that learned from it; None for none so far."""
    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """Sessions by status; statuses without one are absent."""
    mean_reward: float | None = None
    """Mean over the completed sessions."""


class SessionFilter(Frozen):
    """Which sessions a list holds; None for any."""

    # They are parameters of addresses, too, whose descriptions the API document takes from here.
    model_config = ConfigDict(use_attribute_docstrings=True)

    task_id: str | None = None
    """Only of this task."""
    run: str | None = None
    """Only of this run."""
    step: int | None = Field(default=None, ge=0, lt=2**31)
    """Only those that this step of a run learned from."""
    status: SessionStatus | None = None
    """Only those in this status."""
    harness: str | None = None
    """Only of this harness."""
    model: str | None = None
    """Only those that ended with this model."""
    version: int | None = Field(default=None, ge=0, lt=2**31)
    """Only those that ended with a token of this policy version."""
    node: str | None = None
    """Only those that this node has, or had to their end."""
    reward: Reward | None = None
    """Only those with such a reward."""
    reward_min: float | None = None
    """Only rewards of at least this."""
    reward_max: float | None = None
    """Only rewards of at most this."""
    seconds_min: float | None = None
    """Only those that ended after at least this many seconds in their stages."""
    seconds_max: float | None = None
    """Only those that ended after at most this many seconds in their stages."""
    text: str | None = Field(default=None, max_length=128)
    """A part of the id, which begins with the task's."""


class SessionHead(Frozen):
    """Fields of every view of a stored session."""

    id: Id
    """Task id and sample number."""
    task_id: Id
    """Id of the task."""
    run: Id
    """Name of the task's run."""
    sample: int
    """Sample number, from 0."""
    attempt: int
    """Number of attempts so far."""
    status: SessionStatus
    node: str | None = None
    """Current node, or the last one if it ended; None if it has none."""
    created_at: float
    """Unix seconds."""
    updated_at: float
    """Unix seconds of its last change, heartbeats included."""
    origin: Origin | None = None
    """Session whose recorded answers it begins with; None for none."""


class SessionView(SessionHead):
    """A stored session."""

    progress: Progress
    result: SessionResult | None = None
    """Set once the session has ended."""


class TaskPage(Frozen):
    tasks: tuple[TaskView, ...]
    next: str | None = None
    """Pass as `after` to get the next page; None on the last."""


class TaskBatch(Frozen):
    """Tasks that are stored together, all or none."""

    tasks: tuple[TaskSpec, ...] = Field(min_length=1, max_length=1000)


class TaskBatchView(Frozen):
    """The tasks of a batch in their order."""

    tasks: tuple[TaskView, ...]
    known: tuple[Id, ...] = ()
    """Tasks that existed already with the same content."""


class SessionPage(Frozen):
    sessions: tuple[SessionView, ...]
    next: str | None = None
    """Pass as `after` to get the next page; None on the last."""


class ResultPage(Frozen):
    """A piece of the feed of ended sessions, in the order they were stored."""

    results: tuple[SessionResult, ...]
    cursor: int
    """Pass as `cursor` to get what comes after; unchanged when nothing came."""
    end: int
    """Position of the newest result of any task; later results follow it."""
    policy_version: int = 0
    """Policy version of the page, if it has results."""
    stale: tuple[Id, ...] = ()
    """Sessions with tokens of an older policy than requested."""

    @property
    def fresh(self) -> tuple[SessionResult, ...]:
        """The results that are not stale."""
        stale = frozenset(self.stale)
        return tuple(result for result in self.results if result.session_id not in stale)


class RunView(Frozen):
    """A run and how far it is."""

    name: Id
    """Unique on the server."""
    kind: RunKind
    created_at: float
    """Unix seconds of its first task or step."""
    updated_at: float
    """Unix seconds of its last result or step; its beginning if it has none."""
    tasks: int = 0
    """Number of tasks."""
    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """Sessions by status; statuses without one are absent."""
    mean_reward: float | None = None
    """Mean over the completed sessions."""
    step: int | None = None
    """Last step that its trainer reported; None if there is none."""
    latest: dict[str, float] = Field(default_factory=dict)
    """Numbers of that step."""


class RunPage(Frozen):
    """Runs, the newest first."""

    runs: tuple[RunView, ...]
    next: str | None = None
    """Pass as `after` to get the next page; None on the last."""


class RunStart(Frozen):
    """A trainer begins a run, or resumes it."""

    kind: RunKind = RunKind.TRAINING
    step: int = Field(default=0, ge=0, lt=2**31)
    """The step that it resumes after: what was reported of later ones is dropped. 0 drops all steps."""


MOST_NUMBERS = 1000
"""How many numbers a step may have, and a page of curves may show."""
LONGEST_NUMBER_NAME = 256


class RunStep(Frozen):
    """What a trainer reports of a step."""

    step: int = Field(ge=0, lt=2**31)
    """Number of the step; 0 for what is measured before the first."""
    numbers: dict[Annotated[str, Field(max_length=LONGEST_NUMBER_NAME)], float] = Field(
        default_factory=dict, max_length=MOST_NUMBERS
    )
    """Metrics of the step by name."""
    tasks: tuple[Id, ...] = Field(default=(), max_length=10_000)
    """Tasks of the run whose groups the step learned from."""


class RunSteps(Frozen):
    """Steps in any order; a step that was reported before is replaced."""

    steps: tuple[RunStep, ...] = Field(min_length=1, max_length=1000)


class BranchRequest(Frozen):
    """A request for sessions of the same task that begin with an ended session's recorded answers."""

    calls: int = Field(ge=0)
    """Number of model calls answered from the recording before the model samples."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Number of branches."""
    on_divergence: OnDivergence = OnDivergence.LIVE
    budgets: BudgetScope = BudgetScope.NEW
    """What of a branch its task's budgets count."""
    request_id: Id | None = None
    """Makes the request idempotent; None always adds new branches."""


class ReplayRequest(Frozen):
    """A request for a session, in a task of its own, that repeats an ended one from its recording."""

    calls: int | None = Field(default=None, ge=0)
    """Number of model calls to repeat; None for all recorded."""
    on_divergence: OnDivergence = OnDivergence.STOP
    samples_on: bool = False
    """Whether the model answers what is asked after these calls; otherwise the agent is ended there."""
    request_id: Id | None = None
    """Makes the request idempotent; None always replays again."""


class EventPage(Frozen):
    """A piece of the feed of events, in the order they were stored."""

    events: tuple[SessionEvent, ...]
    cursor: int
    """Pass as `cursor` to get what comes after; unchanged when nothing came."""


NODE_PROTOCOL = 8
"""Protocol version, equal on node and server, raised with every incompatible change. A new field in what
either reads is one, since unknown keys are errors; so is a new field of a task."""


class Join(Frozen):
    """A node registers before it requests work; any protocol version can send this."""

    model_config = ConfigDict(extra="ignore")

    protocol: int = NODE_PROTOCOL
    """Protocol version of the node."""
    version: str = Field(max_length=64)
    """Polar version of the node, which may differ if the protocol is the same."""
    places: dict[SessionStatus, Annotated[int, Field(ge=0, lt=2**31)]] = Field(default_factory=dict)
    """Capacity by stage."""
    runtimes: tuple[str, ...] = ()
    """Runtimes that tasks may use on it."""


class Joined(Frozen):
    """The server accepts the node."""

    model_config = ConfigDict(extra="ignore")

    version: str
    """Polar version of the server."""
    lease_seconds: float
    """Seconds that a lease lasts without a heartbeat."""
    resume_bytes: int = 0
    """Maximum bytes of a running session's capture that the server keeps, so that another node can resume it;
    0 for none."""
    is_draining: bool = False
    """Whether it gets no sessions until it is resumed."""


MOST_LEASES = 1024
"""Maximum leases per request."""
MOST_AVOIDED = 100
"""Maximum tasks to avoid in one request."""


class LeaseRequest(Frozen):
    """A node requests work."""

    max_sessions: int = Field(ge=1, le=MOST_LEASES)
    """Number of free places."""
    wait_seconds: float = Field(default=0.0, ge=0, le=60)
    """Maximum seconds to wait for work."""
    runtimes: tuple[str, ...]
    """Runtimes whose tasks it takes."""
    avoid: tuple[Id, ...] = Field(default=(), max_length=MOST_AVOIDED)
    """Tasks to lease only if no others wait."""


class Leases(Frozen):
    leases: tuple[Lease, ...]


class SessionBeat(Frozen):
    """One session in a node's heartbeat."""

    session_id: Id
    """Id of the session."""
    key: LeaseKey
    """Key of the node's lease."""
    status: SessionStatus
    progress: Progress = Progress()
    entered: tuple[StageEntry, ...] = ()
    """Stages entered since the last answered heartbeat, in order."""


class Heartbeat(Frozen):
    """A node reports its sessions, which renews their leases."""

    sessions: tuple[SessionBeat, ...] = ()
    trouble: str | None = Field(default=None, max_length=4096)
    """Why the node takes no more sessions; None if it does."""


class HeartbeatAnswer(Frozen):
    cancel: tuple[Id, ...] = ()
    """Sessions the user cancelled: end them and post a result with status cancelled."""
    lost: tuple[Id, ...] = ()
    """Sessions whose lease is no longer this node's: end them and post nothing."""


class Release(Frozen):
    """A node that shuts down returns an unfinished session; the attempt is not counted."""

    key: LeaseKey
    """Key of the node's lease."""


class Health(Frozen):
    status: str = "ok"
    """Always `ok`."""
    version: str
    """Polar version of the server."""
    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """Sessions by status; statuses without one are absent."""


class Problem(Frozen):
    """The body of every control-plane error."""

    error: str
    """The problem and, if there is one, the fix, on one line."""
    code: str
    """Stable: invalid_input, unauthorized, forbidden, not_found, conflict, unavailable, too_large or
    internal."""


class TaskEnd(Frozen):
    """Result of a whole task."""

    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """Ended sessions by status."""
    mean_reward: float | None = None
    """Mean over the completed sessions."""


class Notice(Frozen):
    """The body of a webhook: a session or task has ended."""

    id: str
    """The same on every attempt, so that receivers can deduplicate."""
    event: WebhookEvent
    task_id: str
    session_id: str | None = None
    """Id of the ended session; None for a task."""
    at: float
    """Unix seconds when the result was stored."""
    result: SessionResult | None = None
    """Result of the ended session."""
    task: TaskEnd | None = None
    """Result of the ended task."""


class WebhookView(Frozen):
    """A receiver that tasks name, and its position in the feed of results."""

    url: str
    """Address of the receiver."""
    lag: int
    """Number of undelivered results."""
    lag_seconds: float
    """Seconds that the oldest has waited."""
    failures: int
    """Consecutive failed attempts."""
    error: str | None = None
    """Error of the last attempt; None if it succeeded."""
    retry_at: float | None = None
    """Unix seconds of the next attempt after a failure."""
    delivered_at: float | None = None
    """Unix seconds of the last delivery."""


class WebhookList(Frozen):
    webhooks: tuple[WebhookView, ...]
