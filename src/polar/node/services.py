"""What the sessions of a node share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polar.config.settings import JudgeSettings, NodeSettings, environment_secret
from polar.engines.base import ModelInfo
from polar.evaluators.base import JudgeEndpoint
from polar.gateway.server import Gateway
from polar.node.directory import node_directory
from polar.node.installations import Installations
from polar.node.metrics import Metrics
from polar.node.pools import Pools
from polar.node.snapshots import Snapshots
from polar.node.workers import Workers
from polar.runtimes.base import Host


@dataclass(frozen=True, slots=True)
class NodeServices:
    """One a node; everything a session needs that is not its own."""

    settings: NodeSettings
    pools: Pools
    gateway: Gateway
    model: ModelInfo
    installations: Installations
    snapshots: Snapshots
    metrics: Metrics
    workers: Workers
    directory: Path
    """The node's own below the data directory."""
    judges: Mapping[str, JudgeEndpoint] = field(default_factory=dict)

    @classmethod
    def below(
        cls, data_dir: Path, settings: NodeSettings, gateway: Gateway, model: ModelInfo
    ) -> NodeServices:
        directory = node_directory(data_dir, settings.name)
        pools = Pools(settings)
        return cls(
            settings=settings,
            pools=pools,
            gateway=gateway,
            model=model,
            installations=Installations(),
            snapshots=Snapshots(Host(directory)),
            metrics=Metrics(pools),
            workers=Workers(),
            directory=directory,
            judges=judge_endpoints(settings),
        )

    @property
    def host(self) -> Host:
        """This node, as runtimes see it."""
        return Host(self.directory, self.settings.disk_reserve_bytes, self.settings.upload_roots)

    @property
    def captures_dir(self) -> Path:
        """One log a session, until its recording is stored; outside the sandboxes, which are reaped."""
        return self.directory / "captures"

    @property
    def kept_dir(self) -> Path:
        """What evaluators keep for people to look at, until it is stored with the artifacts."""
        return self.directory / "kept"

    @property
    def cache_dir(self) -> Path:
        """What evaluators remember from one session to the next."""
        return self.directory / "cache"


def judge_endpoints(settings: NodeSettings) -> dict[str, JudgeEndpoint]:
    """The models that tasks may name as judges on this node, with their keys."""
    return {name: _endpoint(name, judge) for name, judge in settings.judges.items()}


def _endpoint(name: str, judge: JudgeSettings) -> JudgeEndpoint:
    variable = judge.api_key_env
    key = environment_secret(variable, f"node.judges.{name}.api_key_env") if variable else None
    return JudgeEndpoint(judge.url, judge.model, key)
