"""What a fleet is asked for and what it shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polar.app.fleet.planning import NodeState
from polar.app.fleet.scaling import parse_size
from polar.config.settings import FleetSettings, Settings
from polar.models.component import Frozen


@dataclass(frozen=True, slots=True)
class FleetOrder:
    """What a fleet is started with; what it says of itself holds no secret."""

    server: str
    fleet: FleetSettings
    drain_seconds: float
    token: str = field(repr=False)
    """With which the supervisor asks the server."""
    settings: dict[str, Any] = field(repr=False)
    """The nodes' own settings, as a settings file has them."""
    node_token: str | None = field(default=None, repr=False)
    """What nodes bring instead, which opens no more than they need."""

    @property
    def ca(self) -> str | None:
        """The file of those who signed the server's certificate, the same on every machine."""
        ca: str | None = self.settings.get("node", {}).get("ca")
        return ca

    @classmethod
    def of(cls, settings: Settings, server: str, token: str) -> FleetOrder:
        parse_size(settings.fleet.nodes)
        given = settings.model_dump(mode="json", exclude_unset=True, exclude={"fleet", "data_dir", "server"})
        return cls(server, settings.fleet, settings.node.drain_seconds, token, given)

    def node_settings(self, name: str) -> dict[str, Any]:
        """The settings document of one node."""
        return {
            **self.settings,
            "data_dir": str(self.fleet.data_dir),
            "server": {"token": self.node_token or self.token},
            "node": {**self.settings.get("node", {}), "name": name, "count": 1, "server": self.server},
        }


class NodeView(Frozen):
    name: str
    host: str
    state: NodeState
    detail: str | None = None


class FleetView(Frozen):
    """A fleet as its supervisor last saw it."""

    server: str
    size: str
    wanted: int = 0
    """Nodes there should be now."""
    missing: int = 0
    """Of these, nodes for which no machine has room; the cluster's autoscaler is asked for machines."""
    machines: int = 0
    """Those that carry a node."""
    unended: int | None = None
    """Sessions queued or under way; None: the server could not be asked."""
    nodes: tuple[NodeView, ...] = ()
    looks: int = 0
    """How often the supervisor has looked."""
    is_ending: bool = False
    trouble: str | None = None
    """What went wrong at the last look or with the last node that failed."""
