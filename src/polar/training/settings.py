"""One YAML file → the frozen, validated settings of a training run; unknown keys are errors."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, model_validator

from polar.config.documents import read_yaml
from polar.config.settings import DEFAULT_MODEL
from polar.errors import InvalidInput, explain
from polar.models.component import Frozen
from polar.trajectory.learnable import MIN_STD, Advantage


def _from_file(path: Path, info: ValidationInfo) -> Path:
    return info.context / path if isinstance(info.context, Path) else path


def _model_from_file(name: str, info: ValidationInfo) -> str:
    """A name is a path only where it leads to a directory: others are known by it."""
    path = _from_file(Path(name), info)
    return str(path) if info.context and name != DEFAULT_MODEL and path.is_dir() else name


FromFile = Annotated[Path, AfterValidator(_from_file)]
"""A path relative to the directory of the run's file, once `load_run` has read it."""


class Level(StrEnum):
    """What counts alike in the loss."""

    TOKEN = "token"
    """Every trained token of the step."""
    SEQUENCE = "sequence"
    """Every sample of the step, however many tokens, traces and branches it has."""
    CONSTANT = "constant"
    """Every token of every step: its weight depends neither on how long sessions are nor on how many groups
    have rewards that differ (Dr. GRPO)."""


class Pack(StrEnum):
    """How traces are laid out in batches."""

    TREE = "tree"
    """Traces that begin alike share the tokens they begin with."""
    SEQUENCE = "sequence"
    """Each whole and apart."""
    ALONE = "alone"
    """Each a batch of its own: the way for models with layers that no mask keeps from seeing other traces,
    as linear attention."""


class Lora(Frozen):
    """A low-rank adapter is trained instead of all weights."""

    rank: int = Field(default=16, ge=1)
    """Of the adapter's matrices."""
    alpha: int = Field(default=32, ge=1)
    """What they add is scaled by this over the rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers to adapt, as `peft` takes them."""


class ModelSettings(Frozen):
    """The policy: where it starts and how it is computed."""

    name: Annotated[str, AfterValidator(_model_from_file)] = DEFAULT_MODEL
    """The default model, a directory, or a Hugging Face model id."""
    start: FromFile | None = None
    """Weights or an adapter to begin with, as a checkpoint's `weights` holds them; None: the model's own
    weights. `polar examples` writes an adapter to `examples/warm-start`."""
    lora: Lora | None = None
    """None: all weights are trained."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What is computed on; auto: a GPU if there is one."""
    precision: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """What is computed in; auto: bfloat16 on a GPU, float32 on a CPU. What is trained is kept in float32.
    float64 is for checking: everything is kept in it, and masks are dense."""
    compile: bool = False
    """Compile the model's layers: about a minute at the first step, then fewer and larger kernels."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    routing: Literal["replay", "own"] = "replay"
    """Which experts tokens of a mixture of experts go to. replay: those that they were sampled with, where
    these were recorded (`engine.record_routing`). own: those that the trainer computes."""
    chunk: int = Field(default=1024, ge=1)
    """How many tokens' logits are there at once: tokens × vocabulary is what fills a memory."""


FULL_LR = 1e-6
ADAPTER_LR = 1e-5
"""The learning rates where a file names none. An adapter begins at nothing and moves few weights, so it takes
larger steps."""


class OptimizerSettings(Frozen):
    """AdamW and its learning rate."""

    lr: float | None = Field(default=None, gt=0)
    """The learning rate, after warm-up. None: 1e-6 where all weights are trained, 1e-5 for an adapter."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Down to zero at the last step, except `constant`."""
    warmup_steps: int = Field(default=0, ge=0)
    """In which the learning rate rises to `lr`."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are cut to this length."""
    updates: int = Field(default=1, ge=1, le=64)
    """Optimizer steps made with one batch of groups; beyond the first, clipping holds the policy back."""


class ObjectiveSettings(Frozen):
    """The loss; docs/training.md has the formula."""

    rewards: Literal["own", "shuffled"] = "own"
    """What sessions are credited with. shuffled: the rewards of their group, dealt out by chance; a control
    in which rewards tell nothing, so whatever still rises has another cause."""
    advantage: Advantage = Advantage.GROUP
    normalise: bool = True
    """With `advantage: tree` or `turn`: divide by the standard deviation of the group's rewards, as `group`
    does; otherwise advantages keep the size of rewards, as with `mean`."""
    min_std: float = Field(default=MIN_STD, gt=0)
    """The least that advantages are divided by, where they are divided by a standard deviation."""
    level: Level = Level.TOKEN
    session_tokens: int = Field(default=4096, ge=1)
    """With `level: constant`: a token weighs one over this many, over the step's scored samples."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """See `clip_high`."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio of new to old policy counts up to 1 + this, and down to 1 − `clip_low`."""
    max_importance: float = Field(default=2.0, gt=0)
    """Where the ratio of trainer to recorded policy is truncated."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the policy that the run began with; 0: not computed."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """What sessions are sampled with. Tokens sampled otherwise are left out, and counted."""
    max_staleness: int = Field(default=2, ge=0)
    """Tokens of a policy more versions ago are left out, and counted. It also bounds how far rollouts run
    ahead of training: 0 is synchronous."""

    @model_validator(mode="after")
    def _normalises_trees_alone(self) -> ObjectiveSettings:
        if not self.normalise and not self.advantage.is_of_trees:
            raise ValueError(
                "'normalise: false' is for 'advantage: tree' and 'turn'; 'advantage: mean' divides by nothing"
            )
        return self

    @property
    def comparison(self) -> Advantage:
        """How rewards are compared that stand in no tree."""
        return self.advantage if self.normalise else Advantage.MEAN


class BatchSettings(Frozen):
    """How many tokens are computed together."""

    tokens: int = Field(default=16_384, ge=2)
    """The budget of one forward pass; a longer trace is left out, and counted."""
    pack: Pack = Pack.TREE


class CheckpointSettings(Frozen):
    every: int = Field(default=10, ge=1)
    """Steps; the last step always makes one."""
    keep: int = Field(default=2, ge=1)
    """How many of the latest stay."""


class MetricsSettings(Frozen):
    """Where numbers go, beside the terminal and metrics.jsonl."""

    tensorboard: bool = False
    """Whether to write them to `tensorboard` in `out`, too."""
    wandb: str | None = None
    """The project; None: not used."""


MOST_TOKEN_KL = 20.0
"""What one token adds at most to a mean KL divergence from the recorded policy."""


class DivergenceLimits(Frozen):
    """What stops a run as diverged, beside a loss or gradient that is not finite."""

    behaviour_kl: float | None = Field(default=10.0, gt=0, lt=MOST_TOKEN_KL)
    """Mean KL divergence between the recorded policy and the trainer's, over a step. No token counts more
    than 20, so a single one that is far off stops no run."""
    loss: float | None = Field(default=None, gt=0)
    """Of a step; None: any."""


class RunSettings(Frozen):
    """What every run has."""

    out: Path
    """The run's directory: checkpoints, metrics.jsonl. A run that has begun there goes on."""
    steps: int = Field(ge=1)
    """How many the run has."""
    seconds: float | None = Field(default=None, gt=0)
    """After so long the step that is being made is the last one of this process; the same command goes on."""
    seed: int = Field(default=0, ge=0)
    """Of every choice that is left to chance."""
    model: ModelSettings = ModelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    batch: BatchSettings = BatchSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When the run is saved, to go on from there."""
    metrics: MetricsSettings = MetricsSettings()
    limits: DivergenceLimits = DivergenceLimits()


class HeldOutSettings(Frozen):
    """Tasks that are not learnt from, to see how well the policy does."""

    tasks: tuple[FromFile, ...] = Field(min_length=1)
    """Task files, tasksets, or directories of them."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Sessions of each task."""
    every: int = Field(default=10, ge=1)
    """Steps; also after the last."""


class RolloutSettings(Frozen):
    """Tasks that are rolled out with the policy as it learns."""

    tasks: tuple[FromFile, ...] = Field(min_length=1)
    """Task files, tasksets, or directories of them."""
    samples: int = Field(default=8, ge=2, le=1024)
    """Sessions of each group."""
    spares: int = Field(default=0, ge=0)
    """Groups that a step takes beyond its own, at most, for those whose rewards are all equal."""
    rest: int = Field(default=0, ge=0)
    """Rounds through the tasks that a task sits out after such a group."""
    server: str | None = None
    """The URL of a `polar serve` that runs the model; its token comes from $POLAR_TOKEN or its data
    directory. None: a whole system is started for this run, with its data in `out`."""
    config: FromFile | None = None
    """Settings of that system (a polar.yaml): its engine, its node."""
    concurrency: int | None = Field(default=None, ge=1)
    """Agents that it runs at once."""
    synchronous: bool = False
    """Roll out and train in turns; otherwise rollouts go on while training, `max_staleness` steps ahead."""
    weights: FromFile | None = None
    """A directory that nodes read weights from (below their `weight_roots`); None: shared memory, or the
    data of a system of the run's own."""
    transfer: Literal["files", "cuda-ipc", "nccl"] = "files"
    """How all weights reach the engines. files: through files. cuda-ipc: read by vLLM from the trainer's GPU
    memory, where both run on one GPU and vLLM was started with `--weight-transfer-config '{"backend":
    "ipc"}'`. nccl: sent to a vLLM on other GPUs, of this machine or another, which was started with
    `--weight-transfer-config '{"backend": "nccl"}'`; the trainer, too, needs vLLM installed. Adapters travel
    as files."""
    address: str = "127.0.0.1"
    """With `transfer: nccl`, this machine's address as nodes and engines reach it."""
    held_out: HeldOutSettings | None = None


class GrpoSettings(RunSettings):
    """`polar train RUN.yaml`."""

    groups: int = Field(default=4, ge=1)
    """Of each step."""
    rollouts: RolloutSettings | None = None
    recordings: FromFile | None = None
    """A directory of recordings to learn from, instead of rolling out: no engine is needed."""
    objective: ObjectiveSettings = ObjectiveSettings()

    @model_validator(mode="after")
    def _has_one_source(self) -> GrpoSettings:
        if (self.rollouts is None) == (self.recordings is None):
            raise ValueError("exactly one of 'rollouts' and 'recordings' is needed")
        return self

    @property
    def ahead(self) -> int:
        """How many steps rollouts may run ahead of training."""
        synchronous = self.rollouts is not None and self.rollouts.synchronous
        return 0 if synchronous else self.objective.max_staleness


class SftSettings(RunSettings):
    """`polar train sft RUN.yaml`."""

    data: tuple[FromFile, ...] = Field(min_length=1)
    """Datasets of `polar generate`: directories, or their tokens.parquet."""
    rows: int = Field(default=16, ge=1)
    """Of each step; after the last row all are shuffled and read again."""
    level: Literal[Level.TOKEN, Level.SEQUENCE] = Level.TOKEN
    """What weighs the same in a step: every token, or every row."""


R = TypeVar("R", bound=RunSettings)


def load_run(path: Path, kind: type[R]) -> R:
    """The settings in a file. Paths in it are relative to its directory, `out` to the current one."""
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise InvalidInput(f"{path}: must be a mapping of settings")
    try:
        return kind.model_validate(document, context=path.parent)
    except ValidationError as error:
        raise InvalidInput(f"{path}: {explain(error)}") from None
