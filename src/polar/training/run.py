"""A run assembled from its settings, begun anew or continued where its directory says it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from polar.app.datagen.place import DATA
from polar.client import Client
from polar.errors import Conflict, InvalidInput
from polar.files import locked
from polar.tasksets.files import load_tasks
from polar.training import checkpoint
from polar.training.checkpoint import Checkpoint
from polar.training.learner import Learner, LossOf
from polar.training.loop import CHECKPOINTS, HeldOutNumbers, Training, nothing_held_out
from polar.training.metrics import board, require
from polar.training.objective import likelihood_loss, policy_loss
from polar.training.policy import load_policy
from polar.training.rollouts import HELD_OUT, HeldOut, Rollouts
from polar.training.server import Say, rollout_server
from polar.training.settings import GrpoSettings, Pack, RolloutSettings, RunSettings, SftSettings
from polar.training.sinks import Engines, Nowhere, WeightSink
from polar.training.sources import Dataset, Recordings, Source

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)


def train(settings: RunSettings, console: Console) -> Checkpoint:
    """Carry the run out to its last step; the checkpoint it ends with."""
    require(settings.metrics)
    settings.out.mkdir(parents=True, exist_ok=True)
    if (done := checkpoint.latest(settings.out / CHECKPOINTS)) and done.step >= settings.steps:
        more = f"--steps {done.step + settings.steps}"
        console.print(f"finished: {done.step} steps are done; {more} trains on, --out DIR begins anew")
        return done
    with _alone(settings.out), ExitStack() as stack:
        training = assemble(settings, stack, lambda step: console.print(f"• {step}", markup=False))
        shown = stack.enter_context(board(settings.metrics, settings.out, training.step, console))
        return training.run(shown)


def assemble(settings: RunSettings, stack: ExitStack, say: Say) -> Training:
    """Everything a run is made of, as far as its last checkpoint; the stack ends what was opened."""
    checkpoint.seed_all(settings.seed)
    found = checkpoint.latest(settings.out / CHECKPOINTS)
    supply = _supply(settings, stack, say)
    learner = _learner(settings, found)
    if settings.optimizer.lr is None:
        what = "an adapter" if learner.policy.is_adapter else "all weights"
        say(f"the learning rate is {learner.lr:g}, for {what}; optimizer.lr names another")
    training = Training(settings, supply.source, learner, supply.sink, supply.held_out)
    if found is not None:
        log.info("going on after step %d", found.step)
        training.resume(found)
    return training


@dataclass(frozen=True, slots=True)
class Supply:
    """What stands at both ends of a step."""

    source: Source
    sink: WeightSink = field(default_factory=Nowhere)
    held_out: HeldOutNumbers = nothing_held_out


def _supply(settings: RunSettings, stack: ExitStack, say: Say) -> Supply:
    match settings:
        case GrpoSettings(rollouts=RolloutSettings() as rollouts):
            tasks = load_tasks(*rollouts.tasks)
            place = stack.enter_context(rollout_server(settings, rollouts, tasks, say))
            client = stack.enter_context(Client(place.url, place.token))
            return Supply(
                Rollouts(settings, rollouts, client, tasks),
                Engines(client, settings.out, _weights(settings, rollouts)),
                _held_out(settings, rollouts, client),
            )
        case GrpoSettings(recordings=Path() as recordings):
            return Supply(Recordings(settings, recordings))
        case SftSettings():
            return Supply(Dataset(settings))
        case _:
            raise InvalidInput(f"{type(settings).__name__} is no kind of run")


def _weights(settings: GrpoSettings, rollouts: RolloutSettings) -> Path | None:
    """Where weights are left for engines: a system of the run's own keeps them with its data."""
    if rollouts.weights is None and rollouts.server is None:
        return settings.out / DATA / "weights"
    return rollouts.weights


def _learner(settings: RunSettings, found: Checkpoint | None) -> Learner:
    loss: LossOf = likelihood_loss
    temperature, has_reference = 1.0, False
    if isinstance(settings, GrpoSettings):
        loss = partial(policy_loss, settings=settings.objective)
        temperature, has_reference = settings.objective.temperature, settings.objective.kl > 0
    policy = load_policy(
        settings.model,
        weights=found.weights if found else None,
        temperature=temperature,
        most_tokens=settings.batch.tokens,
        is_packed=settings.batch.pack is not Pack.ALONE,
        has_reference=has_reference,
    )
    return Learner(
        policy, loss, settings.optimizer, settings.limits, settings.steps, has_reference=has_reference
    )


def _held_out(settings: GrpoSettings, rollouts: RolloutSettings, client: Client) -> HeldOutNumbers:
    asked = rollouts.held_out
    if asked is None:
        return nothing_held_out
    every = asked.every
    tasks = HeldOut(
        client,
        load_tasks(*asked.tasks),
        asked.samples,
        settings.objective.temperature,
        settings.out / HELD_OUT,
    )
    return lambda step, is_last: tasks.numbers(step) if step % every == 0 or is_last else {}


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Nobody else trains into this directory meanwhile; the lock ends with the process."""
    with locked(out / ".lock", busy=Conflict(f"{out}: another `polar train` is writing there")):
        yield
