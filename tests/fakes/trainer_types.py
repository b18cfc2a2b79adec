"""The types of trainers that are not installed here, as their sources declare them.

Bridges are tested with the packages of verl, SkyRL and AReaL themselves in `suites/bridges`. slime and
prime-rl are not on PyPI: their types name the revision that they were read from, on 2026-11-16.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict


class AgentLoopMetrics(BaseModel):
    """verl 0.9."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """verl 0.9, without what is for images."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = {}


class AgentLoopBase(ABC):
    """verl 0.9: what its constructor leaves for `run`."""

    def __init__(self, rollout_config: Any, tokenizer: Any) -> None:
        self.rollout_config = rollout_config
        self.tokenizer = tokenizer

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput: ...


@dataclass
class SlimeSample:
    """slime, without what is for images, teachers and replayed sampling.

    Read from THUDM/slime at 624b824a898a (2026-08-21): slime/utils/types.py; what becomes of samples is in
    `_convert_samples_to_train_data` of slime/ray/rollout.py.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    remove_sample: bool = False

    def get_reward_value(self, args: Any) -> Any:
        return self.reward


def slime_train_data(samples: list[SlimeSample]) -> dict[str, list[list[float]]]:
    """The arrays of a batch, under the conditions that slime's conversion sets.

    Whether there are logprobs is asked of the first sample; then all of them are made tensors.
    """
    for one in samples:
        assert one.loss_mask is not None
        assert len(one.loss_mask) == one.response_length <= len(one.tokens)
    found: dict[str, list[list[float]]] = {"loss_masks": [list(one.loss_mask or []) for one in samples]}
    if samples[0].rollout_log_probs is not None:
        found["rollout_log_probs"] = [list(map(float, one.rollout_log_probs)) for one in samples]  # type: ignore[arg-type]
    if samples[0].rollout_routed_experts is not None:
        for one in samples:
            assert len(one.rollout_routed_experts) == len(one.tokens) - 1  # type: ignore[arg-type]
        found["rollout_routed_experts"] = [one.rollout_routed_experts for one in samples]  # type: ignore[misc]
    return found


class GeneratorInterface(ABC):
    """SkyRL 0.4."""

    @abstractmethod
    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]: ...


@dataclass
class TrajectoryID:
    """SkyRL 0.4."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


GENERATOR_OUTPUT = frozenset(
    {
        "prompt_token_ids",
        "response_ids",
        "rewards",
        "loss_masks",
        "stop_reasons",
        "rollout_metrics",
        "rollout_logprobs",
        "trajectory_ids",
        "is_last_step",
    }
)
"""The keys of SkyRL 0.4's GeneratorOutput that are not for images or experts."""


class TrainingSample(BaseModel):
    """prime-rl, where it is a struct: one trace as a flat sequence, without what is for images and experts.

    Read from PrimeIntellect-ai/prime-rl at 559b44772e47 (2026-08-21, version 0.8.0):
    src/prime_rl/transports/rollouts/types.py. Its order of fields is the order on the wire.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


class RolloutWorkflow(ABC):
    """AReaL 1.0."""

    @abstractmethod
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None: ...


class Statistics:
    """AReaL 1.0: where workflows report numbers."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def scalar(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self.found.setdefault(name, []).append(float(number))


STATISTICS = Statistics()


MODULES: dict[str, dict[str, Any]] = {
    "verl.experimental.agent_loop.agent_loop": {
        "AgentLoopBase": AgentLoopBase,
        "AgentLoopMetrics": AgentLoopMetrics,
        "AgentLoopOutput": AgentLoopOutput,
    },
    "slime.utils.types": {"Sample": SlimeSample},
    "skyrl.train.generators.base": {"GeneratorInterface": GeneratorInterface},
    "prime_rl.transports.rollouts.types": {"TrainingSample": TrainingSample},
    "areal.api.workflow_api": {"RolloutWorkflow": RolloutWorkflow},
    "areal.infra.workflow_context": {"stat_scope": lambda: "rollout"},
    "areal.utils.stats_tracker": {"get": lambda name: STATISTICS},
}


def bridge(name: str) -> Any:
    """The bridge to a trainer, made over these types; nothing of it stays for others to import."""
    with _installed():
        try:
            return importlib.import_module(f"polar.bridges.{name}")
        finally:
            sys.modules.pop(f"polar.bridges.{name}", None)


@contextmanager
def _installed() -> Iterator[None]:
    before = dict(sys.modules)
    for path, types in MODULES.items():
        parts = path.split(".")
        for depth in range(1, len(parts)):
            sys.modules[".".join(parts[:depth])] = ModuleType(parts[depth - 1])
        module = ModuleType(path)
        vars(module).update(types)
        sys.modules[path] = module
    try:
        yield
    finally:
        tops = {path.partition(".")[0] for path in MODULES}
        for path in [path for path in sys.modules if path.partition(".")[0] in tops]:
            del sys.modules[path]
        sys.modules.update({path: before[path] for path in before if path.partition(".")[0] in tops})
