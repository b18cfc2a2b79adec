"""The policy that engines sample with: its version, its pauses, and how it is replaced."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from polar.models.component import Frozen
from polar.models.task import Id

Version = Annotated[int, Field(ge=0, lt=2**31)]
"""Stamped on every token as 32 bits."""

MAX_PAUSE_SECONDS = 1_200.0
"""Below the time after which silent engine connections are closed; a pause can be renewed."""


class PauseMode(StrEnum):
    """How running generations are treated when the policy is paused."""

    KEEP = "keep"
    """They freeze between two tokens, and continue after the pause with the current weights."""
    DRAIN = "drain"
    """They finish first."""
    ABORT = "abort"
    """They are interrupted, and resumed after the pause from their exact tokens, recomputing everything
    before. Those that cannot be resumed (constrained ones, chat mode) finish first."""


class Pause(Frozen):
    """A trainer's request to stop sampling; the same holder can renew it."""

    holder: Id
    """Only the holder updates and resumes."""
    mode: PauseMode = PauseMode.KEEP
    timeout_seconds: float = Field(default=60.0, gt=0, le=MAX_PAUSE_SECONDS)
    """Seconds until the pause ends by itself, from its last renewal."""
    wait_seconds: float = Field(default=60.0, ge=0, le=600)
    """Seconds to wait for nodes to carry it out."""


class Update(Frozen):
    """A trainer replaces the weights. Without a pause the engines freeze just while they load.

    Where no node can load them, all go back to the last that one has loaded, also if the trainer is gone.
    """

    path: str | None = Field(default=None, min_length=1, max_length=4096)
    """A directory or a safetensors file that engines read, below one of the nodes' `weight_roots`.
    None: the weights that the engines were started with."""
    version: Version | None = None
    """None for the next one. It must be higher than all before, so that a late request changes nothing."""
    holder: Id | None = None
    """Required during a pause."""
    wait_seconds: float = Field(default=600.0, ge=0, le=3600)
    """Seconds to wait for nodes to load them."""


class Resume(Frozen):
    holder: Id | None = None
    """Holder of the pause; None ends any pause."""
    wait_seconds: float = Field(default=60.0, ge=0, le=600)
    """Seconds to wait for nodes to carry it out."""


class Weights(Frozen):
    """Weights of an engine."""

    version: Version
    """The policy version that is stamped on tokens sampled with them."""
    path: str | None = None
    """Path; None for the initial weights."""


class NodePolicy(Frozen):
    """The policy on one node."""

    node: str
    """Its name."""
    version: Version
    """Policy version of its engine."""
    is_settled: bool
    """Whether it has carried out every order."""
    error: str | None = None
    """Why it could not; until it can, it does not sample."""


class PolicyView(Weights):
    """The requested policy, and its state on every node that is not silent."""

    is_paused: bool = False
    """Whether sampling is paused."""
    mode: PauseMode | None = None
    """Mode of the pause; None without one."""
    holder: Id | None = None
    """Holder of the pause."""
    seconds_left: float | None = None
    """Seconds until the pause ends by itself."""
    newest: Version = 0
    """The highest version ever requested; the next one is higher."""
    fallback: Weights | None = None
    """Weights that nodes return to if none can load these; None once one has."""
    failure: str | None = None
    """Why the newest weights were given up: no node could load them."""
    nodes: tuple[NodePolicy, ...] = ()

    @property
    def is_settled(self) -> bool:
        """Whether every running node has carried out every order."""
        return all(node.is_settled for node in self.nodes)


class PolicyReport(Frozen):
    """A node reports what it has done, and waits for the next order."""

    step: int = Field(default=-1, ge=-1, lt=2**63)
    """Step of its last order; -1 for none."""
    version: Version = 0
    """Policy version of its engine."""
    error: str | None = Field(default=None, max_length=2000)
    """Why it could not carry the order out."""
    wait_seconds: float = Field(default=0.0, ge=0, le=60)
    """Maximum seconds for the server to wait for the next order."""
    leaves: bool = False
    """Whether the node is leaving, and need not be waited for."""


class PolicyOrder(Weights):
    """The state that a node's engine should have."""

    step: int
    """Rises with every change."""
    is_paused: bool = False
    """Whether sampling is paused."""
    mode: PauseMode = PauseMode.KEEP
    seconds_left: float | None = None
    """Seconds until the pause ends by itself, even without the server."""
