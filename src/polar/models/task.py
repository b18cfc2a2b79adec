"""A task: an instruction, the harness that follows it, and how the attempt is judged."""

from __future__ import annotations

import base64
import binascii
import re
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue

from polar.models.component import Component, Frozen, Named

MAX_ID = 128
"""Maximum length of any id."""
Id = Annotated[str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ID - 1}}}$")]


class RunKind(StrEnum):
    """The kind of work that a run is."""

    TRAINING = "training"
    """`polar train`."""
    EVALUATION = "evaluation"
    """`polar eval`."""
    GENERATION = "generation"
    """`polar generate`."""
    SUBMISSION = "submission"
    """`polar submit`, or tasks submitted through the API."""
    BRIDGE = "bridge"
    """Another trainer, through a bridge."""


class Run(Frozen):
    """A named piece of work whose tasks belong together."""

    name: Id
    """Unique on a server: what comes later under the name joins the run."""
    kind: RunKind = RunKind.SUBMISSION

    @classmethod
    def named(cls, text: str, kind: RunKind) -> Run:
        """A run whose name is made from any text, such as that of a directory."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
        return cls(name=plain[:MAX_ID] or kind.value, kind=kind)


UNNAMED_RUN = Run(name="unnamed")
"""The run of tasks that name none."""


class TaskStatus(StrEnum):
    """Derived from the sessions of the task."""

    QUEUED = "queued"
    """All sessions wait for a node."""
    RUNNING = "running"
    """Some sessions have started, and not all have ended."""
    FINISHED = "finished"
    """All sessions have ended."""
    CANCELLED = "cancelled"
    """All sessions have ended, and the task, or each of them, was cancelled."""


def _workspace_path(path: str) -> str:
    # Plain string work: a taskset may hold a million of them.
    parts = path.split("/")
    is_named = any(part not in ("", ".") for part in parts)
    if not is_named or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError("must be a relative path inside the workspace, without '..'")
    return path


WorkspacePath = Annotated[str, AfterValidator(_workspace_path)]


class FileContent(Frozen):
    """One file of the workspace; exactly one of `text` and `base64` is set."""

    text: str | None = None
    """Content as UTF-8 text."""
    base64: str | None = None
    """Content in base64."""
    executable: bool = False
    """Whether it is executable."""

    def model_post_init(self, _context: object) -> None:
        if (self.text is None) == (self.base64 is None):
            raise ValueError("a file needs exactly one of 'text' and 'base64'")
        if self.base64 is not None:
            try:
                base64.b64decode(self.base64, validate=True)
            except binascii.Error as error:
                raise ValueError(f"'base64' does not decode: {error}") from None

    @property
    def data(self) -> bytes:
        if self.text is not None:
            return self.text.encode()
        assert self.base64 is not None
        return base64.b64decode(self.base64)


class Budgets(Frozen):
    """Limits of a session; queueing does not count."""

    init_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds to create and prepare the sandbox."""
    run_seconds: float = Field(default=1_800.0, gt=0, le=604_800)
    """Seconds for the agent, without policy pauses."""
    evaluate_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds to build traces and score."""
    max_completions: int | None = Field(default=None, ge=1)
    """Maximum model calls; None for unlimited."""
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    """Maximum sampled tokens over all model calls; None for unlimited."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of one call, prompt and answer; None for the model's limit."""


class PrescribedCall(Frozen):
    """One tool call that an answer has to be."""

    tool: str = Field(min_length=1, max_length=256)
    """Name of the tool, as the harness offers it."""
    arguments: dict[str, JsonValue]
    """JSON schema of the arguments, in place of the tool's own."""


class SamplingPin(Frozen):
    """Sampling parameters that override the harness's; None keeps the harness's."""

    temperature: float | None = Field(default=None, ge=0, le=10)
    """0 selects the likeliest token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Only the likeliest tokens up to this share of the probability."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this number of the likeliest tokens only; 0: from all."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Sample k of the task gets seed + k; each completion of a session a seed derived from it."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Upper bound on the harness's value."""
    calls: tuple[PrescribedCall, ...] = Field(default=(), max_length=1000)
    """Calls that the first answers of each conversation have to be, one each; later answers are free. For
    rehearsals with a model that makes no calls by itself: what is sampled so is never trained."""


class Upload(Frozen):
    """Copy a file or a directory of the node's machine into the workspace."""

    upload: WorkspacePath
    """Destination in the workspace."""
    source: str = Field(min_length=1, max_length=4096)
    """An absolute path below one of the roots that the node's `upload_roots` allows."""


class Exec(Frozen):
    """Run a shell command in the workspace; an exit code other than 0 fails the session."""

    exec: str = Field(min_length=1, max_length=100_000)
    """Run by `/bin/sh -c`."""


PrepareStep = Upload | Exec


class Solution(Frozen):
    """How a task can be solved, for `polar tasks validate` alone: it is never submitted with the task."""

    script: str = Field(min_length=1, max_length=1_000_000)
    """Run by `/bin/sh -c` in the workspace, as the agent would be."""
    files: dict[WorkspacePath, FileContent] = Field(default_factory=dict)
    """Files for the script, in the directory `$POLAR_SOLUTION`."""


_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,31}$")]
"""Without underscores, by which some harnesses take a tool's name apart."""


class ToolServer(Frozen):
    """An MCP server whose tools the agent has besides its own; exactly one of `command` and `url` is set."""

    command: str | None = Field(default=None, min_length=1, max_length=4096)
    """A program in the sandbox, started in the workspace, which speaks the protocol over its standard
    input and output."""
    args: tuple[str, ...] = Field(default=(), max_length=1000)
    """The program's arguments."""
    env: dict[Annotated[str, Field(pattern=_VARIABLE)], str] = Field(default_factory=dict, repr=False)
    """Environment variables of the program."""
    url: str | None = Field(default=None, pattern=r"^https?://[^\s/?#@]", max_length=4096)
    """A server of the protocol's streamable HTTP transport, which the sandbox must be able to reach."""
    headers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")], str] = Field(
        default_factory=dict, repr=False
    )
    """Headers of every request to the server."""

    def model_post_init(self, _context: object) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("a tool server needs exactly one of 'command' and 'url'")
        if self.url is None and self.headers:
            raise ValueError("'headers' need a 'url'; a command takes 'env'")
        if self.command is None and (self.args or self.env):
            raise ValueError("'args' and 'env' need a 'command'; a URL takes 'headers'")
        if any("\0" in text for text in (self.command or "", *self.args, *self.env.values())):
            raise ValueError("no program takes a null character")
        told = (self.url or "", *self.headers.values())
        if not all(text.isprintable() and not {"$", "{", "!"} & {*text} for text in told):
            # Harnesses would put variables, or what a command prints, in their place, each in its own way.
            raise ValueError("a URL and headers must be printable and without '$', '{' and '!'")


class OnDivergence(StrEnum):
    """How a request that differs from the recorded one is handled."""

    STOP = "stop"
    """The agent is stopped."""
    LIVE = "live"
    """The model answers it and all later requests."""
    RECORDED = "recorded"
    """It gets the recorded answer to the other request, which is never trained."""


class BudgetScope(StrEnum):
    """What of a branch its budgets count."""

    NEW = "new"
    """What it adds; the beginning that it is given again costs nothing."""
    SESSION = "session"
    """All of it: it ends where a sample with that beginning would."""


class Branching(Frozen):
    """Sessions that share a sample's beginning and then continue independently."""

    at: Named
    """The strategy that chooses the model calls before which branches leave a session."""
    samples: int = Field(default=1, ge=1, le=64)
    """Branches at each of these calls."""
    depth: int = Field(default=1, ge=1, le=8)
    """1 branches samples only, 2 also branches, and so on."""
    on_divergence: OnDivergence = OnDivergence.LIVE
    budgets: BudgetScope = BudgetScope.NEW
    """What of a branch model calls, sampled tokens and seconds are counted for."""


class WebhookEvent(StrEnum):
    SESSION_ENDED = "session_ended"
    """A session has ended; sent with its result."""
    TASK_ENDED = "task_ended"
    """Every session of the task has ended."""


def _plain_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must begin with https:// or http:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no user or password: it is shown; the signature tells who calls")
    if parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("must have no fragment, space or control character, and be ASCII")
    _ = parts.port  # ValueError if it is none
    return url


class Webhook(Frozen):
    """A receiver of a task's results, and its events."""

    url: Annotated[str, Field(max_length=2048), AfterValidator(_plain_url)]
    """Its host must be listed in the server's `server.webhooks.allow`."""
    events: tuple[WebhookEvent, ...] = Field(default=(WebhookEvent.SESSION_ENDED,), min_length=1)
    """Events to send."""


class TaskSpec(Frozen):
    """A task as a user writes it."""

    id: Id
    """Name of the task. Resubmitting the same task changes nothing; another task under the name is
    refused."""
    instruction: str = Field(min_length=1, max_length=1_000_000)
    """The agent's instruction."""
    harness: Named
    evaluator: Named
    runtime: Named = Component(name="bubblewrap")
    builder: Named = Component(name="prefix_merging")
    samples: int = Field(default=1, ge=1, le=1024)
    """Number of attempts in its group."""
    early_stop: int | None = Field(default=None, ge=1)
    """Number of completed samples with trainable tokens after which the others are cancelled."""
    branching: Branching | None = None
    """Sessions in the group besides the samples; None for none."""
    files: dict[WorkspacePath, FileContent] = Field(default_factory=dict)
    """Files in the workspace before the agent starts."""
    tools: dict[ToolName, ToolServer] = Field(default_factory=dict, max_length=32)
    """MCP servers by name, whose tools the harness offers besides its own."""
    prepare: tuple[PrepareStep, ...] = Field(default=(), max_length=100)
    """Steps in the sandbox after that, in order, within `budgets.init_seconds`."""
    artifacts: tuple[WorkspacePath, ...] = Field(default=(), max_length=100)
    """Globs of workspace files to keep, besides the agent's logs and diff."""
    budgets: Budgets = Budgets()
    allow_no_model_calls: bool = False
    """Whether to score a session without an answered model call. By default that is an infrastructure
    failure: an agent that never reached the model says nothing about it."""
    sampling: SamplingPin = SamplingPin()
    priority: int = Field(default=50, ge=0, le=100)
    """Higher first; tasks of equal priority take turns."""
    webhook: Webhook | None = None
    """Receiver of its results."""
    run: Run | None = None
    """The run that it belongs to; None for `unnamed`. A task that is there already stays in the run that it
    came with."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Returned with the results; of all of it training reads `family`, by which it reports rewards."""

    @property
    def named_run(self) -> Run:
        """The run that it belongs to, which may be that of tasks that name none."""
        return self.run or UNNAMED_RUN

    @property
    def components(self) -> tuple[tuple[str, str, Component], ...]:
        """The named extensions: kind, field and component."""
        named = (
            ("harnesses", "harness", self.harness),
            ("runtimes", "runtime", self.runtime),
            ("evaluators", "evaluator", self.evaluator),
            ("builders", "builder", self.builder),
        )
        return (
            named if self.branching is None else (*named, ("branchings", "branching.at", self.branching.at))
        )
