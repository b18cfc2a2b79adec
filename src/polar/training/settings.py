"""One YAML file → the frozen, validated settings of a training run; unknown keys are errors."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, model_validator

from polar.config.documents import read_yaml
from polar.config.settings import DEFAULT_MODEL, EngineSettings
from polar.errors import InvalidInput, explain
from polar.models.component import Frozen
from polar.models.task import Run, RunKind
from polar.trajectory.learnable import MIN_STD, Advantage, EndedSession, Excluded, Group


def _from_file(path: Path, info: ValidationInfo) -> Path:
    return info.context / path if isinstance(info.context, Path) else path


def _model_from_file(name: str, info: ValidationInfo) -> str:
    """A name is a path only where it leads to a directory: others are known by it."""
    path = _from_file(Path(name), info)
    return str(path) if info.context and name != DEFAULT_MODEL and path.is_dir() else name


FromFile = Annotated[Path, AfterValidator(_from_file)]
"""A path relative to the directory of the run's file, once `load_run` has read it."""


class Level(StrEnum):
    """The unit that counts equally in the loss."""

    TOKEN = "token"
    """Every trained token of the step."""
    SEQUENCE = "sequence"
    """Every sample of the step, however many tokens, traces and branches it has."""
    CONSTANT = "constant"
    """Every token of every step: its weight depends neither on how long sessions are nor on how many groups
    have rewards that differ (Dr. GRPO)."""


class Pack(StrEnum):
    """How traces are packed into batches."""

    TREE = "tree"
    """Traces share common prefixes."""
    SEQUENCE = "sequence"
    """Every trace is separate."""
    ALONE = "alone"
    """Every trace is a batch: for models whose layers cannot be packed, such as those with a window shorter
    than a batch, or with linear attention other than Gated DeltaNet."""


class TooLong(StrEnum):
    """What becomes of traces that are longer than a forward pass."""

    DROP = "drop"
    """They are left out."""
    CUT = "cut"
    """Their beginning is trained, in exactly its context, with the credit of the whole."""


class Lora(Frozen):
    """Trains a low-rank adapter instead of all weights."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapter's matrices."""
    alpha: int = Field(default=32, ge=1)
    """Scales the adapter by alpha/rank."""
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
    """The adapter; None trains all weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto is a GPU if there is one."""
    precision: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Precision; auto is bfloat16 on a GPU, float32 on a CPU. Trained weights stay in float32. float64 is for
    checking: everything is kept in it, and masks are dense."""
    compile: bool = False
    """Compile the model's layers: about a minute at the first step, then fewer and larger kernels."""
    gradient_checkpointing: bool = False
    """Recompute activations instead of keeping them."""
    routing: Literal["replay", "own"] = "replay"
    """Experts of each token in a mixture of experts. replay: those recorded at sampling
    (`engine.record_routing`). own: the trainer's own."""
    chunk: int = Field(default=1024, ge=1)
    """Number of tokens whose logits exist at once, since tokens × vocabulary fills memory."""


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
    """Steps of linear warm-up to `lr`."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm; longer gradients are scaled down."""
    updates: int = Field(default=1, ge=1, le=64)
    """Optimizer steps made with one batch of groups; beyond the first, clipping holds the policy back."""


class ObjectiveName(StrEnum):
    """A published objective; docs/training.md has the formulas."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    DAPO = "dapo"
    GSPO = "gspo"
    CISPO = "cispo"
    DISTILL = "distill"
    """On-policy distillation from `teacher`."""


class Unit(StrEnum):
    """What a ratio of two policies is of."""

    TOKEN = "token"
    TRACE = "trace"
    """All trained tokens of a trace, which its terms then have in common."""


class OldPolicy(StrEnum):
    """The policy that the new one is held near."""

    TRAINER = "trainer"
    """The trainer's before the step; what it differs from the recorded one is corrected by importance."""
    RECORDED = "recorded"
    """The one that sampled each token, as in the papers; importance is then 1."""


class Surrogate(StrEnum):
    """How the ratio of new to old policy is held near 1."""

    CLIPPED = "clipped"
    """Ratio times advantage, up to where the ratio is clipped: beyond there is no gradient (PPO)."""
    WEIGHTED = "weighted"
    """The clipped ratio is a constant weight of the token's logprob: every token has a gradient (CISPO)."""
    PLAIN = "plain"
    """Ratio times advantage: nothing is clipped (REINFORCE)."""


class Outliers(StrEnum):
    """What becomes of a ratio of trainer to recorded policy outside of its band."""

    TRUNCATE = "truncate"
    """It counts as the band's nearest end."""
    MASK = "mask"
    """It counts as 0: its tokens add nothing but KL and entropy to the loss, and are counted."""


class KlPlace(StrEnum):
    """Where the KL divergence to the reference policy enters."""

    LOSS = "loss"
    """In the loss, differentiated."""
    REWARD = "reward"
    """In the reward: taken from a token's advantage for it and all later tokens of its trace."""
    ADVANTAGE = "advantage"
    """Taken from a token's advantage for this token alone."""


class KlEstimator(StrEnum):
    """An estimate of KL(π, π_ref) from a sampled token, with d = log π − log π_ref."""

    K1 = "k1"
    """d: unbiased, of either sign."""
    K2 = "k2"
    """d² / 2: biased; its gradient is that of KL."""
    K3 = "k3"
    """exp(−d) + d − 1: unbiased, never below zero."""


class TeacherSettings(EngineSettings):
    """The engine of the policy that the KL divergence is taken to."""

    model: Annotated[str, AfterValidator(_model_from_file)] = DEFAULT_MODEL
    """Without `url`: the model that an engine is started with, its name or directory."""


PRESETS: Mapping[str, Mapping[str, Any]] = {
    ObjectiveName.GRPO: {"level": Level.SEQUENCE, "clip_high": 0.2},
    ObjectiveName.DR_GRPO: {"advantage": Advantage.MEAN, "level": Level.CONSTANT, "clip_high": 0.2},
    ObjectiveName.RLOO: {
        "advantage": Advantage.LEAVE_ONE_OUT,
        "level": Level.CONSTANT,
        "surrogate": Surrogate.PLAIN,
    },
    ObjectiveName.DAPO: {},
    ObjectiveName.GSPO: {"level": Level.SEQUENCE, "ratio": Unit.TRACE, "clip_low": 3e-4, "clip_high": 4e-4},
    ObjectiveName.CISPO: {"surrogate": Surrogate.WEIGHTED, "clip_low": 1.0, "clip_high": 4.0},
    ObjectiveName.DISTILL: {
        "advantage": Advantage.NONE,
        "surrogate": Surrogate.PLAIN,
        "kl": 1.0,
        "kl_in": KlPlace.ADVANTAGE,
    },
}
"""The parts in which an objective differs from the defaults below, which are DAPO's."""
PARTS = (
    *("advantage", "level", "surrogate", "old", "ratio", "clip_low", "clip_high"),
    *("importance", "min_importance", "max_importance", "outliers", "kl", "kl_in", "entropy"),
)
"""What is said of an objective at the start."""


class ObjectiveSettings(Frozen):
    """The loss; docs/training.md has the formulas. A part that is set overrides the preset's."""

    name: ObjectiveName = ObjectiveName.DAPO
    """The preset: grpo, dr_grpo, rloo, dapo, gspo, cispo or distill."""
    rewards: Literal["own", "shuffled"] = "own"
    """Rewards of sessions. shuffled: dealt out within the group at random; a control in which rewards carry
    no information, so that any gain has another cause."""
    advantage: Advantage = Advantage.GROUP
    normalise: bool = True
    """With `advantage: tree` or `turn`: divide by the standard deviation of the group's rewards, as `group`
    does; otherwise advantages keep the size of rewards, as with `mean`."""
    min_std: float = Field(default=MIN_STD, gt=0)
    """Minimum standard deviation to divide advantages by."""
    level: Level = Level.TOKEN
    session_tokens: int = Field(default=4096, ge=1)
    """With `level: constant`, a token's weight is one over this many tokens and over the step's scored
    samples."""
    surrogate: Surrogate = Surrogate.CLIPPED
    old: OldPolicy = OldPolicy.TRAINER
    ratio: Unit = Unit.TOKEN
    """Whether the ratio of new to old policy is a token's, or the geometric mean over its trace's (GSPO)."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """See `clip_high`."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio of new to old policy counts up to 1 + this, and down to 1 − `clip_low`."""
    importance: Unit = Unit.TOKEN
    """Whether the ratio of trainer to recorded policy is a token's, or the product over its trace's."""
    min_importance: float = Field(default=0.0, ge=0, le=1)
    """Lower end of that ratio's band."""
    max_importance: float = Field(default=2.0, ge=1)
    """Upper end of that ratio's band."""
    outliers: Outliers = Outliers.TRUNCATE
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference policy: the teacher's, or the initial one; 0 skips its
    computation."""
    kl_in: KlPlace = KlPlace.LOSS
    kl_estimator: KlEstimator | None = None
    """None: k3 in the loss, k1 elsewhere."""
    teacher: TeacherSettings | None = None
    """An engine whose model is the reference policy: it is shown what was sampled, and says how likely it
    holds it. `url` and `kind` name one that runs, `model` one to start; it needs the policy's tokenizer."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature of sessions. Tokens sampled otherwise are excluded and counted."""
    max_staleness: int = Field(default=2, ge=0)
    """Maximum staleness in versions; staler tokens are excluded and counted. It also bounds how far rollouts
    run ahead of training: 0 is synchronous."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {**PRESETS.get(str(given.get("name")), {}), **given}

    @model_validator(mode="after")
    def _makes_sense(self) -> ObjectiveSettings:
        if not self.normalise and not self.advantage.is_of_trees:
            raise ValueError(
                "'normalise: false' is for 'advantage: tree' and 'turn'; 'advantage: mean' divides by nothing"
            )
        if self.advantage is Advantage.NONE and not self.kl:
            raise ValueError("'advantage: none' learns from the KL divergence alone, but 'kl' is 0")
        if self.name is ObjectiveName.DISTILL and self.teacher is None:
            raise ValueError("'name: distill' needs a 'teacher'")
        if self.teacher is not None and not self.kl:
            raise ValueError("'teacher' has no effect while 'kl' is 0; 'name: distill' sets it to 1")
        if self.teacher is not None and self.temperature != 1:
            raise ValueError("'teacher' needs 'temperature: 1', at which engines score tokens")
        if self.kl_in is KlPlace.LOSS and self.kl_estimator is KlEstimator.K1:
            raise ValueError(
                "'kl_estimator: k1' in the loss has a gradient of 0 on average; k2 has that of KL"
            )
        return self

    @property
    def comparison(self) -> Advantage:
        """The comparison of rewards outside of trees."""
        return self.advantage if self.normalise else Advantage.MEAN

    @property
    def estimator(self) -> KlEstimator:
        """The estimator of the KL divergence, where it enters."""
        return self.kl_estimator or (KlEstimator.K3 if self.kl_in is KlPlace.LOSS else KlEstimator.K1)

    @property
    def keeps_start(self) -> bool:
        """Whether the trainer keeps the initial policy as the reference."""
        return self.kl > 0 and self.teacher is None

    def learns_from(self, group: Group) -> bool:
        """Whether anything can be learned from a group with these rewards."""
        return self.advantage is Advantage.NONE or group.rewards_differ

    def exclusion(self, session: EndedSession) -> Excluded | None:
        """Why nothing is learned from a session; None if something may be."""
        return session.unlearnable if self.advantage is Advantage.NONE else session.unscored

    @property
    def summary(self) -> str:
        """The effective parts; those that differ from the preset's are marked."""
        unused = {"clip_low", "clip_high"} if self.surrogate is Surrogate.PLAIN else set()
        unused |= set() if self.kl else {"kl_in"}
        return f"{self.name}: " + ", ".join(map(self._said, [name for name in PARTS if name not in unused]))

    def _said(self, part: str) -> str:
        value = getattr(self, part)
        is_preset = value == PRESETS[self.name].get(part, type(self).model_fields[part].default)
        return f"{part} {value}" + ("" if is_preset else " (set)")


class BatchSettings(Frozen):
    """Size of a forward pass."""

    tokens: int = Field(default=16_384, ge=2)
    """Token budget of a forward pass."""
    pack: Pack = Pack.TREE
    overlong: TooLong = TooLong.DROP
    """What becomes of longer traces. What is left out is counted."""


class CheckpointSettings(Frozen):
    every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always makes one."""
    keep: int = Field(default=2, ge=1)
    """Number of latest checkpoints to keep."""


class MetricsSettings(Frozen):
    """Targets of metrics, besides the terminal and metrics.jsonl."""

    server: str | None = None
    """URL of a server whose dashboard shows the run, for runs without rollouts; its token comes from
    $POLAR_TOKEN or its data directory. Rollouts have their server's."""
    tensorboard: bool = False
    """Whether to write them to `tensorboard` in `out`, too."""
    wandb: str | None = None
    """The W&B project; None for none. With WANDB_MODE=offline nothing is sent before `wandb sync`."""
    mlflow: str | None = None
    """The MLflow experiment; None for none. MLFLOW_TRACKING_URI says where it is; a file is offline."""
    trackio: str | None = None
    """The trackio project, which is on this machine; None for none."""
    rollouts: int = Field(default=4, ge=0, le=100)
    """Sessions of each step whose prompt, response and reward these trackers show, from best to worst."""


MOST_TOKEN_KL = 20.0
"""Maximum contribution of one token to a mean KL divergence from the recorded policy."""


class DivergenceLimits(Frozen):
    """Limits that stop a run as diverged, besides a non-finite loss or gradient."""

    behaviour_kl: float | None = Field(default=10.0, gt=0, lt=MOST_TOKEN_KL)
    """Mean KL divergence between the recorded policy and the trainer's, over a step. No token counts more
    than 20, so a single one that is far off stops no run."""
    loss: float | None = Field(default=None, gt=0)
    """Maximum loss of a step; None for unlimited."""


class RunSettings(Frozen):
    """Settings of every run."""

    out: Path
    """The run's directory, with checkpoints and metrics.jsonl. A run that began there is resumed."""
    steps: int = Field(ge=1)
    """Number of steps."""
    seconds: float | None = Field(default=None, gt=0)
    """Seconds after which the current step is the last of this process; the same command resumes."""
    seed: int = Field(default=0, ge=0)
    """Random seed."""
    model: ModelSettings = ModelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    batch: BatchSettings = BatchSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When to save checkpoints."""
    metrics: MetricsSettings = MetricsSettings()
    limits: DivergenceLimits = DivergenceLimits()

    @property
    def named(self) -> Run:
        """What the run is called on a server: as its directory is."""
        return Run.named(self.out.resolve().name, RunKind.TRAINING)


class HeldOutSettings(Frozen):
    """Held-out tasks, to evaluate the policy."""

    tasks: tuple[FromFile, ...] = Field(min_length=1)
    """Task files, tasksets, or directories of them."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Sessions per task."""
    every: int = Field(default=10, ge=1)
    """Steps between evaluations; the last step always has one."""


class RolloutSettings(Frozen):
    """Tasks to roll out with the current policy."""

    tasks: tuple[FromFile, ...] = Field(min_length=1)
    """Task files, tasksets, or directories of them."""
    samples: int = Field(default=8, ge=2, le=1024)
    """Sessions per group."""
    spares: int = Field(default=0, ge=0)
    """Maximum extra groups per step, to replace those with all rewards equal."""
    rest: int = Field(default=0, ge=0)
    """Rounds that a task skips after such a group."""
    server: str | None = None
    """The URL of a `polar serve` that runs the model; its token comes from $POLAR_TOKEN or its data
    directory. None: a whole system is started for this run, with its data in `out`."""
    config: FromFile | None = None
    """Settings of that system (a polar.yaml), such as its engine and node."""
    concurrency: int | None = Field(default=None, ge=1)
    """Maximum concurrent agents of that system."""
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
    """Groups per step."""
    minibatches: int = Field(default=1, ge=1)
    """Parts that a step's groups are dealt to, each with an optimizer step of its own; ratios are to the
    policy before the first."""
    rollouts: RolloutSettings | None = None
    recordings: FromFile | None = None
    """A directory of recordings to learn from, instead of rolling out: no engine is needed."""
    objective: ObjectiveSettings = ObjectiveSettings()

    @model_validator(mode="after")
    def _has_one_source(self) -> GrpoSettings:
        if (self.rollouts is None) == (self.recordings is None):
            raise ValueError("exactly one of 'rollouts' and 'recordings' is needed")
        if self.minibatches > self.groups:
            raise ValueError(f"{self.groups} groups cannot be dealt to {self.minibatches} minibatches")
        return self

    @property
    def ahead(self) -> int:
        """Maximum steps that rollouts run ahead of training."""
        synchronous = self.rollouts is not None and self.rollouts.synchronous
        return 0 if synchronous else self.objective.max_staleness


class SftSettings(RunSettings):
    """`polar train sft RUN.yaml`."""

    data: tuple[FromFile, ...] = Field(min_length=1)
    """Datasets of `polar generate`: directories, or their tokens.parquet."""
    rows: int = Field(default=16, ge=1)
    """Rows per step; after the last row all are shuffled and read again."""
    level: Literal[Level.TOKEN, Level.SEQUENCE] = Level.TOKEN
    """The unit of equal weight in a step: every token, or every row."""


R = TypeVar("R", bound=RunSettings)


def load_run(path: Path, kind: type[R]) -> R:
    """Load settings from a file. Paths in it are relative to its directory, `out` to the current one."""
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise InvalidInput(f"{path}: must be a mapping of settings")
    try:
        return kind.model_validate(document, context=path.parent)
    except ValidationError as error:
        raise InvalidInput(f"{path}: {explain(error, known=kind.model_fields)}") from None
