"""One attempt at a task: its status and its result."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from polar.models.component import Frozen
from polar.models.task import BudgetScope, Id, OnDivergence, TaskSpec

PROCESSED = "processed_logprobs"
RAW = "raw_logprobs"
"""vLLM's names for logprobs after temperature, and before it."""


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
    """There is no reward; `error` says why. The capture is kept."""
    CANCELLED = "cancelled"
    """By request, or because enough samples of its task had ended."""

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({SessionStatus.COMPLETED, SessionStatus.FAILED, SessionStatus.CANCELLED})


class AgentEnd(StrEnum):
    """How the harness's run ended."""

    EXITED = "exited"
    """By itself, with `exit_code`, which is unreliable."""
    TIMEOUT = "timeout"
    """`budgets.run_seconds` ended it."""
    BUDGET = "budget"
    """A completion or token budget ended it."""
    CANCELLED = "cancelled"
    """The session was cancelled."""
    REPLAYED = "replayed"
    """The recording that it followed ended, or the session left it."""
    NOT_STARTED = "not_started"
    """It never ran."""


class FailureReason(StrEnum):
    """Why a session failed, and whether a retry may help."""

    INFRASTRUCTURE = "infrastructure"
    """Not the agent's fault: the machine, the sandbox or the engine failed, or no model call was ever
    answered. The session is retried up to `server.max_attempts` times, and never scored."""
    TASK = "task"
    """The task is at fault: a prepare step, a budget or the evaluator failed."""


class Progress(Frozen):
    """Progress of a running session, as its node reports it with every heartbeat."""

    completions: int = 0
    """Recorded model calls."""
    sampled_tokens: int = 0
    """Sampled tokens in those calls."""
    replayed_tokens: int = 0
    """Tokens among these that another session sampled."""


class StageEntry(Frozen):
    """A node reports that a session entered a stage."""

    status: SessionStatus
    seconds_ago: float = Field(ge=0)
    """Seconds before the heartbeat was sent; the clocks of node and server need not agree."""


class SessionEvent(Frozen):
    """A session entered a status."""

    seq: int
    """Position in the feed of all events."""
    session_id: Id
    """Id of the session."""
    task_id: Id
    """Id of the task."""
    attempt: int
    """Attempt number, from 1; 0 before the first."""
    status: SessionStatus
    at: float
    """Unix seconds by the server's clock."""
    node: str | None = None
    """Its node."""
    detail: str | None = None
    """The reason, if unusual."""


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
    """An unsound part of a session's recording; the rest is used."""

    completion: str | None = None
    """The id of the completion concerned; None where the damage hides it."""
    problem: str
    """The problem."""


REPLAYED_TOKENS = "replayed"
"""The reason to exclude tokens that another session sampled."""
UNRECORDED = "unrecorded"
"""In `TrajectoryStats.excluded`: of a session that the server itself ended, what its nodes had sampled by
their last heartbeat. No recording was delivered."""


class TrajectoryStats(Frozen):
    """Where every sampled token went: sampled_tokens = trainable_tokens + sum(excluded.values())."""

    completions: int = 0
    """Recorded model calls."""
    traces: int = 0
    """Sequences that a trainer gets."""
    sampled_tokens: int = 0
    """Sampled tokens of all completions."""
    trainable_tokens: int = 0
    """Sampled tokens that a trace trains."""
    excluded: dict[str, int] = Field(default_factory=dict)
    """Excluded tokens by reason."""
    chains: int = 0
    """Runs of completions that extend each other; more traces than chains where long ones were split."""
    drift: dict[str, int] = Field(default_factory=dict)
    """Completions by relation to the one they continue: clean, drift or rewritten."""
    lineage: dict[str, int] = Field(default_factory=dict)
    """Traces by lineage: main, subagent, compacted, summary or auxiliary."""
    auxiliary: dict[str, int] = Field(default_factory=dict)
    """Side calls by the rule that identified them."""
    omitted: dict[str, int] = Field(default_factory=dict)
    """Completions with images or other parts that the model was not shown, by kind."""
    approximate_tokens: int = 0
    """Trainable tokens that follow other tokens than the policy saw (drift: approximate)."""
    trace_tokens: int = 0
    """Total length of all traces, prompts included."""
    merge_ratio: float = 1.0
    """Length of one trace per completion divided by the length of these traces."""
    faults: tuple[Fault, ...] = ()
    """Unsound parts of the recording."""

    @property
    def replayed_tokens(self) -> int:
        """Tokens that another session sampled, whose statistics have them too."""
        return self.excluded.get(REPLAYED_TOKENS, 0)

    @property
    def new_tokens(self) -> int:
        """Tokens that the session sampled itself."""
        return self.sampled_tokens - self.replayed_tokens


class Verdict(Frozen):
    """An evaluator's verdict on a session."""

    reward: float = Field(allow_inf_nan=False)
    """Reward of the session."""
    components: dict[str, float] = Field(default_factory=dict)
    """Further scores by name."""
    report: str = ""
    """For people; truncated to 64 KiB."""
    trace_rewards: dict[str, float] = Field(default_factory=dict)
    """Rewards of traces by the id of a completion that they train, instead of their share of `reward`."""


class Origin(Frozen):
    """The session whose recorded answers another one begins with."""

    session_id: Id
    """Which session: another one of the same task, or the one that a replay repeats."""
    calls: int | None = Field(default=None, ge=0)
    """Number of model calls, in the order in which they ended, answered from the recording; None for all."""
    samples_on: bool = True
    """Whether the model answers what is asked after these calls; otherwise the agent is ended there."""
    on_divergence: OnDivergence = OnDivergence.LIVE
    budgets: BudgetScope = BudgetScope.NEW
    depth: int = Field(default=1, ge=0)
    """1 for a branch of a sample, 2 for a branch of such a branch, and so on."""


MOST_BRANCH_POINTS = 1024
"""Maximum branch points of a session."""
LONGEST_DIFFERENCE = 16_384
"""Maximum characters of a difference."""
MOST_DIVERGENCES = 16
"""Maximum divergences that are described; all are counted."""
LONGEST_VARIATION = 400
MOST_VARIATIONS = 16
"""Maximum varied lines in a report, and characters of each."""


class Divergence(Frozen):
    """A request that differs from the recorded one, or another version of the harness that makes them."""

    call: int | None = Field(ge=0)
    """Position among the session's model calls by start, from 0; None if the harness's version differs."""
    taken: OnDivergence
    """How it was handled."""
    difference: str = Field(max_length=LONGEST_DIFFERENCE)
    """Unified diff from the recorded request to this one."""


class ReplayReport(Frozen):
    """How closely a session followed its recording."""

    origin: Id
    """Session of the recording; its own id if a later attempt resumes an earlier one."""
    calls: int = 0
    """Model calls that were answered from the recording."""
    sampled_tokens: int = 0
    """Sampled tokens in those answers."""
    unused_calls: int = 0
    """Recorded answers that were never requested."""
    varied_messages: int = 0
    """Messages with other clock times or durations, replaced by the recorded ones."""
    variations: tuple[str, ...] = Field(default=(), max_length=MOST_VARIATIONS)
    """Their first differing lines, as recorded and as received."""
    divergence_count: int = 0
    """Requests that differ from the recorded ones; a session that was resumed with another version of its
    harness has one more."""
    divergences: tuple[Divergence, ...] = Field(default=(), max_length=MOST_DIVERGENCES)
    """The first divergences."""

    @property
    def is_faithful(self) -> bool:
        """Whether exactly the recorded answers were requested."""
        return not self.divergence_count and not self.unused_calls


class SessionResult(Frozen):
    """Result of a session; the tokens are in its recording."""

    session_id: Id
    """Id of the session."""
    task_id: Id
    """Id of the task."""
    sample: int
    """Sample number, from 0."""
    attempt: int
    """The attempt that ended it."""
    status: SessionStatus
    agent_end: AgentEnd = AgentEnd.NOT_STARTED
    exit_code: int | None = None
    """Exit code of the harness; None if it did not end by itself."""
    error: str | None = None
    """Why it failed."""
    failure: FailureReason | None = None
    """Kind of failure; None if it did not fail."""
    warnings: tuple[str, ...] = ()
    """Problems that did not affect the verdict: an artifact that could not be collected, a branching strategy
    that failed."""
    verdict: Verdict | None = None
    stats: TrajectoryStats = TrajectoryStats()
    seconds: StageSeconds = StageSeconds()
    policy_version_min: int | None = None
    """Oldest policy version that sampled a token of it, replayed ones aside; None if none were sampled."""
    policy_version_max: int | None = None
    """Newest policy version among its tokens."""
    harness_version: str | None = None
    """Version of the harness; None if unknown, as for `shell` and `acp`."""
    model: str | None = None
    """The model's name, as reported by the engine."""
    logprobs_mode: str | None = None
    """Distribution of the recorded logprobs: `processed_logprobs` is the one sampled from. None if unknown;
    then only temperature 1 without truncation is sure to be right."""
    renderer: str | None = None
    """Renderer of the prompts: `template` or a family, with any addition to the model's chat template, as in
    `template+tool_prompt`. None if the engine rendered them, or unknown."""
    replay: ReplayReport | None = None
    """How closely it followed its recording; None without one."""
    branch_at: tuple[int, ...] = Field(default=(), max_length=MOST_BRANCH_POINTS)
    """Numbers of model calls after which branches leave it, as its task's strategy chose."""
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
    """Proof that a node's lease of a session is current."""

    fencing_token: int = Field(ge=0, lt=2**63)
    """Increases with every lease of the session; messages with an older one are refused."""
    secret: str = Field(max_length=64, repr=False)
    """Known only to the node with the lease; no API token replaces it."""


class Lease(Frozen):
    """The right of one node to run one attempt of one session, until it expires or is fenced off."""

    session_id: Id
    """Id of the session."""
    task: TaskSpec
    sample: int
    """Sample number, from 0."""
    attempt: int
    """Attempt number, from 1."""
    key: LeaseKey
    """Authorises the node to speak for the session."""
    expires_at: float
    """Unix seconds by the server's clock."""
    origin: Origin | None = None
    """Source of its first answers; None if the model gives all."""
    continues: bool = False
    """Whether earlier attempts at it captured something: their answers come before those of the origin."""

    @property
    def fencing_token(self) -> int:
        return self.key.fencing_token
