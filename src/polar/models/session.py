"""One attempt at a task: its status, and what came of it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from polar.models.component import Frozen
from polar.models.task import Id, OnDivergence, TaskSpec

PROCESSED = "processed_logprobs"
RAW = "raw_logprobs"
"""What vLLM calls logprobs after temperature, and before it."""


class SessionStatus(StrEnum):
    QUEUED = "queued"
    """It waits for a node."""
    INIT = "init"
    """The sandbox is being made."""
    READY = "ready"
    """The sandbox is prewarmed and waits for a run slot."""
    RUNNING = "running"
    """The harness is at work."""
    POSTRUN = "postrun"
    """Traces are built, the evaluator scores."""
    COMPLETED = "completed"
    """A result with a reward is stored, even if a budget ended the agent."""
    FAILED = "failed"
    """No reward could be had; `error` says why. What was captured is kept."""
    CANCELLED = "cancelled"
    """At somebody's wish, or because enough samples of its task were there."""

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({SessionStatus.COMPLETED, SessionStatus.FAILED, SessionStatus.CANCELLED})


class AgentEnd(StrEnum):
    """How the harness's run ended."""

    EXITED = "exited"
    """By itself; `exit_code` says how, and exit codes lie."""
    TIMEOUT = "timeout"
    """`budgets.run_seconds` ended it."""
    BUDGET = "budget"
    """A completion or token budget ended it."""
    CANCELLED = "cancelled"
    """The session was."""
    REPLAYED = "replayed"
    """The recording that it followed was used up, or it left it."""
    NOT_STARTED = "not_started"
    """It never ran."""


class FailureReason(StrEnum):
    """Why a session failed: whether another attempt may go better."""

    INFRASTRUCTURE = "infrastructure"
    """What failed was no work of the agent's: the machine, the sandbox or the engine, or no model call was
    ever answered. The session is run again, up to `server.max_attempts` times, and is never scored."""
    TASK = "task"
    """What the task asks for cannot be done: a prepare step, a budget or the evaluator failed."""


class Progress(Frozen):
    """What a running session has done so far, as its node reports it with every heartbeat."""

    completions: int = 0
    """Model calls that were recorded."""
    sampled_tokens: int = 0
    """Tokens sampled in those calls."""


class StageEntry(Frozen):
    """A node says that a session entered a stage."""

    status: SessionStatus
    seconds_ago: float = Field(ge=0)
    """When the heartbeat was sent; the clocks of node and server need not agree."""


class SessionEvent(Frozen):
    """A session entered a status."""

    seq: int
    """The place in the feed of all events."""
    session_id: Id
    """Which session."""
    task_id: Id
    """Whose."""
    attempt: int
    """Which one it was in, from 1; 0: no node has begun it."""
    status: SessionStatus
    at: float
    """Unix seconds by the server's clock."""
    node: str | None = None
    """Who had it."""
    detail: str | None = None
    """Why, where it is not the usual way on."""


class StageSeconds(Frozen):
    """Wall-clock seconds spent in each stage; 0.0 where the session never was."""

    init: float = 0.0
    """Making the sandbox."""
    ready: float = 0.0
    """Waiting, prewarmed, for a run slot."""
    running: float = 0.0
    """The harness at work."""
    postrun: float = 0.0
    """Building and scoring."""


class Fault(Frozen):
    """Something in a session's recording that is not sound; the rest of it is still used."""

    completion: str | None = None
    """The id of the completion concerned; None where the damage hides it."""
    problem: str
    """What is not sound about it."""


UNRECORDED = "unrecorded"
"""In `TrajectoryStats.excluded`: of a session that the server itself ended, what its nodes had sampled by
their last heartbeat. No recording was delivered."""


class TrajectoryStats(Frozen):
    """Where every sampled token went: sampled_tokens = trainable_tokens + sum(excluded.values())."""

    completions: int = 0
    """Model calls that were recorded."""
    traces: int = 0
    """Sequences that a trainer gets."""
    sampled_tokens: int = 0
    """In all completions."""
    trainable_tokens: int = 0
    """Of the sampled, those that a trace trains."""
    excluded: dict[str, int] = Field(default_factory=dict)
    """Tokens left out of training, by the name of the reason."""
    chains: int = 0
    """Runs of completions that extend each other; more traces than chains where long ones were split."""
    drift: dict[str, int] = Field(default_factory=dict)
    """How completions stand to the one they continue: clean, drift or rewritten → how many."""
    lineage: dict[str, int] = Field(default_factory=dict)
    """main, subagent, compacted, summary or auxiliary → how many traces."""
    auxiliary: dict[str, int] = Field(default_factory=dict)
    """The rule by which a completion was taken for a side call → how many."""
    omitted: dict[str, int] = Field(default_factory=dict)
    """Images and the like that the model was not shown, by kind → how many completions had one to omit."""
    approximate_tokens: int = 0
    """Of the trainable tokens: those that stand after others than the policy saw (drift: approximate)."""
    trace_tokens: int = 0
    """The length of all traces together, prompts included."""
    merge_ratio: float = 1.0
    """How many times longer the traces would be together with one trace a completion."""
    faults: tuple[Fault, ...] = ()
    """What of the recording is not sound."""


class Verdict(Frozen):
    """What an evaluator says of a session."""

    reward: float = Field(allow_inf_nan=False)
    """What the session is worth."""
    components: dict[str, float] = Field(default_factory=dict)
    """Numbers that say more of it, by name."""
    report: str = ""
    """Readable by a person; at most 64 KiB are kept."""
    trace_rewards: dict[str, float] = Field(default_factory=dict)
    """Completion id → the reward of the trace that trains it, instead of its share of `reward`."""


class Origin(Frozen):
    """The session whose recorded answers another one begins with."""

    session_id: Id
    """Which session: another one of the same task, or the one that a replay repeats."""
    calls: int | None = Field(default=None, ge=0)
    """How many of its model calls are answered from the recording: the first ones, in the order in which they
    ended. None: all."""
    samples_on: bool = True
    """Whether the model answers what is asked after these calls; otherwise the agent is ended there."""
    on_divergence: OnDivergence = OnDivergence.LIVE
    depth: int = Field(default=1, ge=0)
    """1: a branch of a sample; 2: a branch of such a branch, and so on."""


MOST_BRANCH_POINTS = 1024
"""Places at which branches leave a session, at most."""
LONGEST_DIFFERENCE = 16_384
"""Characters that are kept of how two requests differ."""
MOST_DIVERGENCES = 16
"""How many divergences of a session are described; all are counted."""
LONGEST_VARIATION = 400
MOST_VARIATIONS = 16
"""Lines that varied of which a report tells, at most, and how many characters of each."""


class Divergence(Frozen):
    """A request that was not the recorded one."""

    call: int = Field(ge=0)
    """Its place among the session's model calls, from 0, in the order in which they began."""
    taken: OnDivergence
    """What was done about it."""
    difference: str = Field(max_length=LONGEST_DIFFERENCE)
    """Between the recorded request and this one, as a unified diff."""


class ReplayReport(Frozen):
    """How far a session followed the recording that it began with."""

    origin: Id
    """Whose recording it was; its own id where a later attempt took up an earlier one."""
    calls: int = 0
    """Model calls that were answered from the recording."""
    sampled_tokens: int = 0
    """Tokens in those answers."""
    unused_calls: int = 0
    """Answers of the recording that were never asked for."""
    varied_messages: int = 0
    """Messages that came with another clock time or measured duration, for which the recorded ones stand."""
    variations: tuple[str, ...] = Field(default=(), max_length=MOST_VARIATIONS)
    """The first lines in which they differ, as they were recorded and as they came."""
    divergence_count: int = 0
    """Requests that were not the recorded ones."""
    divergences: tuple[Divergence, ...] = Field(default=(), max_length=MOST_DIVERGENCES)
    """The first of them."""

    @property
    def is_faithful(self) -> bool:
        """Whether every recorded answer was asked for, and nothing else before them."""
        return not self.divergence_count and not self.unused_calls


class SessionResult(Frozen):
    """What came of a session; the tokens themselves are in its recording."""

    session_id: Id
    """Which session."""
    task_id: Id
    """Whose."""
    sample: int
    """From 0."""
    attempt: int
    """The one that ended it."""
    status: SessionStatus
    agent_end: AgentEnd = AgentEnd.NOT_STARTED
    exit_code: int | None = None
    """The harness's; None: it did not end by itself."""
    error: str | None = None
    """Why it failed."""
    failure: FailureReason | None = None
    """What kind of failure it is; None: it did not fail."""
    warnings: tuple[str, ...] = ()
    """What else went wrong and left the verdict as it is: an artifact that could not be collected, a
    branching strategy that failed."""
    verdict: Verdict | None = None
    stats: TrajectoryStats = TrajectoryStats()
    seconds: StageSeconds = StageSeconds()
    policy_version_min: int | None = None
    """Oldest policy that sampled a token of it, without what was replayed; None: nothing was sampled."""
    policy_version_max: int | None = None
    """Newest."""
    harness_version: str | None = None
    """Of the harness that ran."""
    model: str | None = None
    """Its name, as the engine gives it."""
    logprobs_mode: str | None = None
    """Of which distribution the recorded logprobs are: `processed_logprobs` is the one sampled from.

    None: the engine neither says so nor shows it, and only temperature 1 without cuts is sure to be right.
    """
    renderer: str | None = None
    """What made the prompts, `template` or a family, and what it said beyond the model's chat template, as in
    `template+tool_prompt`. None: the engine rendered them, or it is not known."""
    replay: ReplayReport | None = None
    """How far it followed the recording that it began with; None: it began with none."""
    branch_at: tuple[int, ...] = Field(default=(), max_length=MOST_BRANCH_POINTS)
    """After how many of its model calls branches leave it, as its task's strategy chose."""
    has_recording: bool = False
    """Whether its tokens are stored."""
    has_artifacts: bool = False
    """Whether logs and files of it are stored."""

    @property
    def is_usable(self) -> bool:
        """Whether a trainer can learn from it."""
        return self.status is SessionStatus.COMPLETED and self.stats.trainable_tokens > 0

    @property
    def reward(self) -> float | None:
        return self.verdict.reward if self.verdict else None


class LeaseKey(Frozen):
    """What a node shows for whatever it says of a session: that its lease is the session's own."""

    fencing_token: int = Field(ge=0, lt=2**63)
    """Rises with every lease of the session; whatever carries an older one is refused."""
    secret: str = Field(max_length=64, repr=False)
    """Known to the node that was given the lease alone: no API token delivers anything without it."""


class Lease(Frozen):
    """The right of one node to run one attempt of one session, until it expires or is fenced off."""

    session_id: Id
    """Which session."""
    task: TaskSpec
    sample: int
    """From 0."""
    attempt: int
    """Which one this is, from 1."""
    key: LeaseKey
    """What authorises the node to speak for the session."""
    expires_at: float
    """Unix seconds by the server's clock."""
    origin: Origin | None = None
    """Whose recorded answers it begins with; None: nobody's."""
    continues: bool = False
    """Whether earlier attempts at it captured something: their answers come before those of the origin."""

    @property
    def fencing_token(self) -> int:
        return self.key.fencing_token
