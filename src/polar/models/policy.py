"""The policy that engines sample with: its version, its pauses, and how it is replaced."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from polar.models.component import Frozen
from polar.models.task import Id

Version = Annotated[int, Field(ge=0, lt=2**31)]
"""It is stamped on every token as 32 bits."""

MAX_PAUSE_SECONDS = 1_200.0
"""Below the silence after which connections to engines are given up; a pause can be renewed."""


class PauseMode(StrEnum):
    """What becomes of generations that are under way when the policy is paused."""

    KEEP = "keep"
    """They freeze between two tokens and go on after the pause, with the weights that there are then."""
    DRAIN = "drain"
    """They are sampled to their end first."""
    ABORT = "abort"
    """They are broken off, and continued from their exact tokens after the pause: everything before is
    computed anew. Those that cannot be continued (constrained ones, chat mode) are drained."""


class Pause(Frozen):
    """A trainer asks that nothing be sampled; the same holder asking again renews its pause."""

    holder: Id
    """Who pauses: only the holder updates and resumes."""
    mode: PauseMode = PauseMode.KEEP
    timeout_seconds: float = Field(default=60.0, gt=0, le=MAX_PAUSE_SECONDS)
    """When the pause ends by itself, counted from the last time it was asked for."""
    wait_seconds: float = Field(default=60.0, ge=0, le=600)
    """How long the answer waits for nodes to have carried it out."""


class Update(Frozen):
    """A trainer replaces the weights. Without a pause the engines freeze just while they load.

    Where no node can load them, all go back to the last that one has loaded, also if the trainer is gone.
    """

    path: str | None = Field(default=None, min_length=1, max_length=4096)
    """A directory or a safetensors file that engines read, below one of the nodes' `weight_roots`.
    None: the weights that the engines were started with."""
    version: Version | None = None
    """None: the next one. One that is not higher than all before is refused, so a request that names its
    version and arrives late changes nothing."""
    holder: Id | None = None
    """Needed while somebody has paused."""
    wait_seconds: float = Field(default=600.0, ge=0, le=3600)
    """How long the answer waits for nodes to have loaded them."""


class Resume(Frozen):
    holder: Id | None = None
    """None: whoever holds the pause, it ends."""
    wait_seconds: float = Field(default=60.0, ge=0, le=600)
    """How long the answer waits for nodes to have carried it out."""


class Weights(Frozen):
    """What an engine samples with."""

    version: Version
    """The policy version that is stamped on tokens sampled with them."""
    path: str | None = None
    """Where they are; None: those that the engine was started with."""


class NodePolicy(Frozen):
    """How far one node is."""

    node: str
    """Its name."""
    version: Version
    """What its engine samples with."""
    is_settled: bool
    """Whether it has done all that was asked."""
    error: str | None = None
    """Why it could not; until it can, it samples nothing."""


class PolicyView(Weights):
    """The policy as it is asked for, and the nodes that are not silent."""

    is_paused: bool = False
    """Whether nothing is to be sampled."""
    mode: PauseMode | None = None
    """Of the pause; None: there is none."""
    holder: Id | None = None
    """Who pauses."""
    seconds_left: float | None = None
    """Until the pause ends by itself."""
    newest: Version = 0
    """The highest version that was ever asked for: the next one is higher."""
    fallback: Weights | None = None
    """What nodes go back to if none of them can load these weights; None: one of them has."""
    failure: str | None = None
    """Why the newest weights are no longer the ones asked for: no node could load them."""
    nodes: tuple[NodePolicy, ...] = ()

    @property
    def is_settled(self) -> bool:
        """Whether every live node has done all that was asked."""
        return all(node.is_settled for node in self.nodes)


class PolicyReport(Frozen):
    """A node says what it has done, and waits for what there is to do next."""

    step: int = Field(default=-1, ge=-1, lt=2**63)
    """Of the last order it has dealt with; -1: of none."""
    version: Version = 0
    """What its engine samples with."""
    error: str | None = Field(default=None, max_length=2000)
    """Why it could not carry the order out."""
    wait_seconds: float = Field(default=0.0, ge=0, le=60)
    """How long the server may hold the answer back while there is no other order."""
    leaves: bool = False
    """Whether the node stops, and need not be waited for."""


class PolicyOrder(Weights):
    """How a node's engine is to be."""

    step: int
    """Rises with every change."""
    is_paused: bool = False
    """Whether nothing is to be sampled."""
    mode: PauseMode = PauseMode.KEEP
    seconds_left: float | None = None
    """Until the pause ends by itself, also if the server is not heard of again."""
