"""What is asked: an instruction, the harness that shall follow it, and how the attempt is judged."""

from __future__ import annotations

import base64
import binascii
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from polar.models.component import Component, Frozen, Named
from polar.models.webhook import Webhook

MAX_ID = 128
"""The longest id, of a task or anything else."""
Id = Annotated[str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ID - 1}}}$")]


class TaskStatus(StrEnum):
    """Derived from the sessions of the task."""

    QUEUED = "queued"
    """All its sessions wait for a node."""
    RUNNING = "running"
    """Some have not ended, and not all of them wait."""
    FINISHED = "finished"
    """All have ended."""
    CANCELLED = "cancelled"
    """All have ended because it was cancelled, or each of them was."""


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
    """As UTF-8."""
    base64: str | None = None
    """Bytes."""
    executable: bool = False
    """Whether it may be run."""

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
    """What a session may use. Waiting in a queue never counts."""

    init_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """To make the sandbox and prepare it."""
    run_seconds: float = Field(default=1_800.0, gt=0, le=604_800)
    """For the agent; time in a policy pause does not count."""
    evaluate_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """To build and score."""
    max_completions: int | None = Field(default=None, ge=1)
    """Model calls; None: any number."""
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    """Over all model calls; None: any number."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """Prompt and answer of one call together; None: what the model has."""


class SamplingPin(Frozen):
    """What the session samples with, whatever the harness asks for; None leaves the harness's wish."""

    temperature: float | None = Field(default=None, ge=0, le=10)
    """0 takes the likeliest token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Only the likeliest tokens up to this share of the probability."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this number of the likeliest tokens only; 0: from all."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Sample k of the task gets seed + k; each completion of a session a seed derived from it."""
    max_tokens: int | None = Field(default=None, ge=1)
    """An upper bound of what the harness asks for."""


class Upload(Frozen):
    """Copy a file or a directory of the node's machine into the workspace."""

    upload: WorkspacePath
    """Where to."""
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
    """What the script needs, in the directory that `$POLAR_SOLUTION` names."""


class OnDivergence(StrEnum):
    """What becomes of a request that a session makes instead of the recorded one."""

    STOP = "stop"
    """The agent is ended there."""
    LIVE = "live"
    """The model answers it, and what follows from it."""
    RECORDED = "recorded"
    """It gets the answer that was recorded for the other request, which is never trained."""


class Branching(Frozen):
    """Sessions that share a sample's beginning and go on from there by themselves."""

    at: Named
    """The strategy that chooses the model calls before which branches leave a session."""
    samples: int = Field(default=1, ge=1, le=64)
    """Branches at each of these calls."""
    depth: int = Field(default=1, ge=1, le=8)
    """1: branches leave the samples alone; 2: they leave branches too, and so on."""
    on_divergence: OnDivergence = OnDivergence.LIVE


class TaskSpec(Frozen):
    """A task as a user writes it."""

    id: Id
    """Its name: the same task under it again changes nothing, another one is refused."""
    instruction: str = Field(min_length=1, max_length=1_000_000)
    """What the agent is told."""
    harness: Named
    evaluator: Named
    runtime: Named = Component(name="bubblewrap")
    builder: Named = Component(name="prefix_merging")
    samples: int = Field(default=1, ge=1, le=1024)
    """Sessions: attempts that make up its group."""
    early_stop: int | None = Field(default=None, ge=1)
    """Once this number of samples have completed with trainable tokens, the others are cancelled."""
    branching: Branching | None = None
    """Which sessions the group has besides the samples; None: none."""
    files: dict[WorkspacePath, FileContent] = Field(default_factory=dict)
    """Put into the workspace before the agent starts."""
    prepare: tuple[PrepareStep, ...] = Field(default=(), max_length=100)
    """What is done in the sandbox after that, in order, on the time of `budgets.init_seconds`."""
    artifacts: tuple[WorkspacePath, ...] = Field(default=(), max_length=100)
    """Globs of workspace files to keep, beside the agent's logs and its diff."""
    budgets: Budgets = Budgets()
    allow_no_model_calls: bool = False
    """Whether a session in which no model call was answered is scored all the same. Without it that is an
    infrastructure failure: an agent that never reached the model says nothing of the model."""
    sampling: SamplingPin = SamplingPin()
    priority: int = Field(default=50, ge=0, le=100)
    """Higher first; tasks of one priority take turns."""
    webhook: Webhook | None = None
    """Where its results are sent as they come."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Kept and handed back with the results; Polar does not read it."""

    @property
    def components(self) -> tuple[tuple[str, str, Component], ...]:
        """What it names: each kind of extension, the field that names one, and which."""
        named = (
            ("harnesses", "harness", self.harness),
            ("runtimes", "runtime", self.runtime),
            ("evaluators", "evaluator", self.evaluator),
            ("builders", "builder", self.builder),
        )
        return (
            named if self.branching is None else (*named, ("branchings", "branching.at", self.branching.at))
        )
