"""Assembles a run from its settings, new or resumed from its directory."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polar.app.own_system import DATA, ServerAddress, only_writer, own_settings, rollout_server
from polar.app.stack import Say
from polar.app.weights import EngineWeights, forget_shared
from polar.client import AsyncClient, Client
from polar.engines import nccl
from polar.engines.embedded.weights import ensure_model
from polar.engines.transfer import Share, SharedTensors
from polar.errors import InvalidInput
from polar.models.task import TaskSpec
from polar.tasksets.files import load_tasks
from polar.telemetry.logs import log_to_file
from polar.training import checkpoint
from polar.training.checkpoint import Checkpoint
from polar.training.learner import Learner, LossOf, ScoresOf
from polar.training.loop import CHECKPOINTS, HeldOutNumbers, Nowhere, Training, WeightSink, follow
from polar.training.metrics import RunOnServer, board
from polar.training.objective import likelihood_loss, policy_loss
from polar.training.policy import load_policy
from polar.training.ranks import Collective, Ranks, are_several, joined, summoned
from polar.training.rollouts import HeldOut, RolloutSource
from polar.training.settings import GrpoSettings, Pack, RolloutSettings, RunSettings, SftSettings
from polar.training.sources import Dataset, MaterialSource, Recordings
from polar.training.teacher import connected_teacher
from polar.training.trackers import require

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

T = TypeVar("T")

TURN_SECONDS = 0.0005
"""Maximum interpreter time slice of server or trainer while the other waits, a tenth of Python's default."""
_ALONE = Ranks()
BESIDE_TRAINER = 0.4
"""Fraction of GPU memory for a vLLM beside the trainer."""


def train(settings: RunSettings, console: Console, processes: int = 1) -> Checkpoint:
    """Train to the last step; return the last checkpoint. As another rank than 0, end the process instead."""
    require(settings.metrics)
    if are_several(processes):
        _check_transfer(settings)
    with joined(settings, processes) as ranks:
        if ranks.leads:
            return _lead(settings, console, ranks)
        _follow(settings, ranks)
    raise SystemExit


def _follow(settings: RunSettings, ranks: Ranks) -> None:
    checkpoint.seed_all(settings.seed + ranks.rank)

    def begin(found: Checkpoint | None) -> Learner:
        learner = _learner(settings, found, ranks)
        if found is not None:
            learner.restore(found)
        return learner

    with ranks.reported():
        follow(begin, ranks)


def _lead(settings: RunSettings, console: Console, ranks: Ranks) -> Checkpoint:
    settings.out.mkdir(parents=True, exist_ok=True)
    if (done := checkpoint.latest(settings.out / CHECKPOINTS)) and done.step >= settings.steps:
        more = f"--steps {done.step + settings.steps}"
        console.print(f"finished: {done.step} steps are done; {more} trains on, --out DIR starts over")
        return done
    with only_writer(settings.out, "train"), ExitStack() as stack, ranks.explained():
        training = assemble(settings, stack, lambda step: console.print(f"• {step}", markup=False), ranks)
        shown = stack.enter_context(
            board(settings.metrics, settings.out, training.step, console, training.on_server)
        )
        return training.run(shown)


def assemble(settings: RunSettings, stack: ExitStack, say: Say, ranks: Ranks = _ALONE) -> Training:
    """Build all parts of a run from its last checkpoint; the stack closes them."""
    checkpoint.seed_all(settings.seed)
    found = checkpoint.latest(settings.out / CHECKPOINTS)
    if found is None and (start := settings.model.start) is not None and not start.is_dir():
        hint = "it is a directory of weights or of an adapter, such as `weights` of a checkpoint"
        raise InvalidInput(f"model.start: {start}: no such directory", hint=hint)
    supply = _supply(settings, stack, say)
    teacher = _teacher(settings, stack, say)
    learner = _learner(settings, found, ranks, teacher)
    if settings.optimizer.lr is None:
        what = "an adapter" if learner.policy.is_adapter else "all weights"
        say(f"the learning rate is {learner.lr:g}, for {what}; optimizer.lr names another")
    if isinstance(settings, GrpoSettings):
        say(f"the objective is {settings.objective.summary}")
        if settings.objective.rewards == "shuffled":
            say("rewards are shuffled within groups: a control, in which they teach nothing")
    training = Training(settings, supply.source, learner, supply.sink, supply.held_out, supply.on_server)
    if found is not None:
        log.info("going on after step %d", found.step)
        training.resume(found)
    return training


def _check_transfer(settings: RunSettings) -> None:
    rollouts = settings.rollouts if isinstance(settings, GrpoSettings) else None
    if rollouts is not None and rollouts.transfer != "files":
        raise InvalidInput(
            f"rollouts.transfer: {rollouts.transfer} is for a trainer of one process", hint="set it to files"
        )


@dataclass(frozen=True, slots=True)
class Supply:
    """A run's source of material and sink of weights."""

    source: MaterialSource
    sink: WeightSink = field(default_factory=Nowhere)
    held_out: HeldOutNumbers | None = None
    on_server: RunOnServer | None = None


def _supply(settings: RunSettings, stack: ExitStack, say: Say) -> Supply:
    match settings:
        case GrpoSettings(rollouts=RolloutSettings() as rollouts):
            tasks = load_tasks(*rollouts.tasks)
            held_out_tasks = load_tasks(*rollouts.held_out.tasks) if rollouts.held_out else []
            if rollouts.transfer == "nccl":
                nccl.require()
            forget_shared(settings.out, weights := _weights(settings, rollouts))
            both = [*tasks, *held_out_tasks]
            address = stack.enter_context(server_beside_trainer(settings, rollouts, both, say))
            client = stack.enter_context(Client(address.url, address.token))
            connect = partial(AsyncClient, address.url, address.token)
            held_out = None
            if (asked := rollouts.held_out) is not None:
                held_out = HeldOut(asked, connect, held_out_tasks, settings)
            sink = EngineWeights(client, settings.out, weights, share=_share(rollouts, stack))
            # While the engines run, which may be reading.
            stack.callback(sink.close)
            source = RolloutSource(settings, rollouts, connect, tasks)
            return Supply(source, sink, held_out, RunOnServer(client, settings.named, address.read_token))
        case GrpoSettings(recordings=Path() as recordings):
            return Supply(Recordings(settings, recordings), on_server=_shown(settings, stack))
        case SftSettings():
            return Supply(Dataset(settings), on_server=_shown(settings, stack))
        case _:
            raise InvalidInput(f"unknown run type: {type(settings).__name__}")


def _shown(settings: RunSettings, stack: ExitStack) -> RunOnServer | None:
    """The server that shows a run which needs none, if the settings name one."""
    if settings.metrics.server is None:
        return None
    return RunOnServer(stack.enter_context(Client(settings.metrics.server)), settings.named)


def _share(rollouts: RolloutSettings, stack: ExitStack) -> Share | None:
    """How engines get weights directly, if not from files."""
    if rollouts.transfer == "nccl":
        return stack.enter_context(nccl.Sender(rollouts.address)).offer
    return SharedTensors if rollouts.transfer == "cuda-ipc" else None


def _weights(settings: GrpoSettings, rollouts: RolloutSettings) -> Path | None:
    """Directory of weights for engines, inside a system of the run's own if there is one."""
    if rollouts.weights is None and rollouts.server is None:
        return settings.out / DATA / "weights"
    return rollouts.weights


def _teacher(settings: RunSettings, stack: ExitStack, say: Say) -> ScoresOf | None:
    """Connect to the teacher, if there is one, which rank 0 alone asks."""
    if not isinstance(settings, GrpoSettings) or (asked := settings.objective.teacher) is None:
        return None
    context = connected_teacher(asked, settings.out, ensure_model(settings.model.name), say)
    return stack.enter_context(in_thread("the teacher", context)).logprobs


def _learner(
    settings: RunSettings, found: Checkpoint | None, ranks: Ranks, teacher: ScoresOf | None = None
) -> Learner:
    """Load policy and optimizer, on all ranks."""
    ranks.order(Collective.BEGIN, found)
    loss: LossOf = likelihood_loss
    temperature, has_reference = 1.0, False
    if isinstance(settings, GrpoSettings):
        loss = partial(policy_loss, settings=settings.objective)
        temperature, has_reference = settings.objective.temperature, settings.objective.keeps_start
    policy = load_policy(
        settings.model,
        weights=found.weights if found else None,
        temperature=temperature,
        most_tokens=settings.batch.tokens,
        is_packed=settings.batch.pack is not Pack.ALONE,
        has_reference=has_reference,
        ranks=ranks,
    )
    return Learner(
        policy,
        loss,
        settings.optimizer,
        settings.limits,
        settings.steps,
        has_reference=has_reference,
        teacher=teacher,
    )


@contextmanager
def server_beside_trainer(
    settings: GrpoSettings, rollouts: RolloutSettings, tasks: Sequence[TaskSpec], say: Say
) -> Iterator[ServerAddress]:
    """The configured server, or a whole system for this run on a thread of its own."""
    if rollouts.server is not None:
        yield ServerAddress(rollouts.server, None)
        return
    lora = settings.model.lora
    engine = {
        "model": settings.model.name,
        "lora_rank": lora.rank if lora else None,
        "weight_transfer": rollouts.transfer,
    }
    own = own_settings(settings.out, rollouts.config, engine, rollouts.concurrency)
    if own.engine.gpu_memory is None and settings.model.device != "cpu":
        own = own.updated(engine={"gpu_memory": BESIDE_TRAINER})
    with (
        _short_turns(),
        in_thread("the run's own rollout server", rollout_server(own, tasks, say)) as address,
    ):
        yield address


@contextmanager
def _short_turns() -> Iterator[None]:
    """Shorten the interpreter's time slices: every kernel launch and every answer waits for one."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def in_thread(name: str, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Keep what is asynchronous open beside the trainer, on an event loop in a thread of its own."""
    started: Future[T] = Future()
    ending: Future[None] = Future()

    async def serve() -> None:
        async with context as entered:
            started.set_result(entered)
            await asyncio.wrap_future(ending)

    def tell(ended: Future[None]) -> None:
        if started.done() and (error := ended.exception()):
            # The trainer sees something that does not answer, and gives up after a while.
            log.error("%s has ended: %s", name, error)

    with ThreadPoolExecutor(1, thread_name_prefix="polar-beside-trainer") as thread:
        serving = thread.submit(asyncio.run, serve())
        serving.add_done_callback(tell)
        try:
            first: list[Future[Any]] = [started, serving]
            wait(first, return_when=FIRST_COMPLETED)
            if not started.done():
                serving.result()
            yield started.result()
        finally:
            # It is cancelled where the context has ended by itself.
            with suppress(InvalidStateError):
                ending.set_result(None)


def main() -> None:
    """Be a rank that another process has started for its run."""
    with summoned() as (settings, ranks):
        log_to_file(settings.out / "train.log", "info")
        _follow(settings, ranks)


if __name__ == "__main__":
    main()
