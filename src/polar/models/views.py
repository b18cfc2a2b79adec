"""What the control plane shows and takes: the bodies of its REST API."""

from __future__ import annotations

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
from polar.models.task import Id, OnDivergence, TaskSpec, TaskStatus
from polar.models.webhook import WebhookEvent


class TaskView(Frozen):
    """A stored task and how far its sessions are."""

    spec: TaskSpec
    status: TaskStatus
    """Derived from the task's sessions."""
    created_at: float
    """Unix seconds, as every time here."""
    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """How many sessions are in each status; statuses without one are absent."""
    mean_reward: float | None = None
    """Over the completed sessions."""


class SessionHead(Frozen):
    """What every view of a stored session begins with."""

    id: Id
    """The task's id and the sample."""
    task_id: Id
    """Whose sample it is."""
    sample: int
    """From 0."""
    attempt: int
    """How many times a node has begun it."""
    status: SessionStatus
    node: str | None = None
    """Who has it, or had it to its end; None: nobody yet, or not now."""
    created_at: float
    """Unix seconds, as every time here."""
    updated_at: float
    """When anything of it changed last, a heartbeat included."""
    origin: Origin | None = None
    """The session whose recorded answers it begins with; None: it begins with none."""


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
    """Tasks that are stored together: all of them or, if one is refused, none."""

    tasks: tuple[TaskSpec, ...] = Field(min_length=1, max_length=1000)


class TaskBatchView(Frozen):
    """The tasks of a batch in their order."""

    tasks: tuple[TaskView, ...]
    known: tuple[Id, ...] = ()
    """Those that were there already, with the same content."""


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
    """The newest result's place in the feed, of all tasks: what is still to come comes after it."""
    policy_version: int = 0
    """The policy's when the page was made, where there are results."""
    stale: tuple[Id, ...] = ()
    """Sessions among them with tokens of an older policy than was asked for."""

    @property
    def fresh(self) -> tuple[SessionResult, ...]:
        """The results that are not stale."""
        stale = frozenset(self.stale)
        return tuple(result for result in self.results if result.session_id not in stale)


class BranchRequest(Frozen):
    """Asks for sessions of the same task that begin with an ended one's recorded answers."""

    calls: int = Field(ge=0)
    """How many of its model calls are answered from the recording; then the model samples."""
    samples: int = Field(default=1, ge=1, le=1024)
    """How many branches."""
    on_divergence: OnDivergence = OnDivergence.LIVE
    request_id: Id | None = None
    """The same request again, by this id, adds nothing and answers the same; None: it adds new ones."""


class ReplayRequest(Frozen):
    """Asks for a session that repeats an ended one from its recording, in a task of its own."""

    calls: int | None = Field(default=None, ge=0)
    """How many of its model calls; None: all that were recorded."""
    on_divergence: OnDivergence = OnDivergence.STOP
    samples_on: bool = False
    """Whether the model answers what is asked after these calls; otherwise the agent is ended there."""
    request_id: Id | None = None
    """The same request again, by this id, changes nothing and answers the same; None: it replays anew."""


class EventPage(Frozen):
    """A piece of the feed of events, in the order they were stored."""

    events: tuple[SessionEvent, ...]
    cursor: int
    """Pass as `cursor` to get what comes after; unchanged when nothing came."""


NODE_PROTOCOL = 7
"""What nodes and servers must agree on: raised whenever one of another number would be misunderstood.

A field more in what either reads is such a case, since unknown keys are errors; so is a task's.
"""


class Join(Frozen):
    """A node introduces itself before it asks for work; one of any protocol is understood that far."""

    model_config = ConfigDict(extra="ignore")

    protocol: int = NODE_PROTOCOL
    """What the node speaks."""
    version: str = Field(max_length=64)
    """Of Polar on the node; nodes of other versions may join as long as the protocol is the same."""
    places: dict[SessionStatus, Annotated[int, Field(ge=0, lt=2**31)]] = Field(default_factory=dict)
    """How many sessions each of its stages takes at once."""
    runtimes: tuple[str, ...] = ()
    """The runtimes that it allows tasks to name."""


class Joined(Frozen):
    """The server takes the node."""

    model_config = ConfigDict(extra="ignore")

    version: str
    """Of Polar on the server."""
    lease_seconds: float
    """How long a lease lasts without a heartbeat."""
    resume_bytes: int = 0
    """How many bytes of a running session's captures the server keeps, so that another node can continue it;
    0: none."""
    is_draining: bool = False
    """Whether it will be leased nothing until it is resumed."""


MOST_LEASES = 1024
"""Of one request."""
MOST_AVOIDED = 100
"""Tasks that one request for leases names."""


class LeaseRequest(Frozen):
    """A node asks for work."""

    max_sessions: int = Field(ge=1, le=MOST_LEASES)
    """As many as it has places for."""
    wait_seconds: float = Field(default=0.0, ge=0, le=60)
    """How long the server may hold the answer back while there is no work."""
    runtimes: tuple[str, ...]
    """Only tasks that name one of these are leased."""
    avoid: tuple[Id, ...] = Field(default=(), max_length=MOST_AVOIDED)
    """Tasks whose sessions are leased only where no others wait."""


class Leases(Frozen):
    leases: tuple[Lease, ...]


class SessionBeat(Frozen):
    """One session in a node's heartbeat."""

    session_id: Id
    """Which session."""
    key: LeaseKey
    """Of the node's lease."""
    status: SessionStatus
    progress: Progress = Progress()
    entered: tuple[StageEntry, ...] = ()
    """Stages it has entered since the last heartbeat that was answered, in order."""


class Heartbeat(Frozen):
    """A node says what it holds; this renews the leases of those sessions."""

    sessions: tuple[SessionBeat, ...] = ()
    trouble: str | None = Field(default=None, max_length=4096)
    """Why the node takes no more sessions for now; None: it does."""


class HeartbeatAnswer(Frozen):
    cancel: tuple[Id, ...] = ()
    """Sessions the user cancelled: end them and post a result with status cancelled."""
    lost: tuple[Id, ...] = ()
    """Sessions whose lease is no longer this node's: end them and post nothing."""


class Release(Frozen):
    """A node that shuts down gives a session back unfinished; the attempt is not counted."""

    key: LeaseKey
    """Of the node's lease."""


class Health(Frozen):
    status: str = "ok"
    """`ok` if it answers at all."""
    version: str
    """Of Polar on the server."""
    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """How many are in each status; statuses without one are absent."""


class Problem(Frozen):
    """The body of every control-plane error."""

    error: str
    """One line: what is wrong and, where there is one, what to do."""
    code: str
    """Stable: invalid_input, unauthorized, forbidden, not_found, conflict, unavailable, too_large or
    internal."""


class TaskEnd(Frozen):
    """What came of a task as a whole."""

    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """How many ended in each status."""
    mean_reward: float | None = None
    """Over the completed sessions."""


class Notice(Frozen):
    """The body of a webhook: something has ended."""

    id: str
    """The same at every attempt: a receiver that has handled it need not do so again."""
    event: WebhookEvent
    task_id: str
    session_id: str | None = None
    """Of a session that ended; None: the task did."""
    at: float
    """When the result was stored, Unix seconds."""
    result: SessionResult | None = None
    """Of a session that ended."""
    task: TaskEnd | None = None
    """Of a task that ended."""
