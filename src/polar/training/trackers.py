"""Trackers of experiments: a run's numbers, and some of each step's rollouts, elsewhere."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from polar.errors import NotInstalled
from polar.models.chat import Message
from polar.recordings.recording import Recording
from polar.training.settings import MetricsSettings
from polar.trajectory.learnable import EndedSession, Group

log = logging.getLogger(__name__)

LONGEST_TEXT = 20_000
"""Maximum characters of one text in a tracker; the dashboard has all."""

Track = Callable[[int, Mapping[str, float], Sequence[Group]], None]


class TrackedRollout(NamedTuple):
    """One session as trackers show it."""

    session: str
    reward: float | None
    prompt: str
    response: str


def require(settings: MetricsSettings) -> None:
    """Raise if a package for the requested metrics is missing."""
    for package in _asked(settings):
        if find_spec(package) is None:
            raise NotInstalled(f"metrics.{package} needs {package}", hint=f"pip install {package}")


def trackers(settings: MetricsSettings, out: Path, step: int) -> Iterator[AbstractContextManager[Track]]:
    """The trackers that are asked for."""
    for package in _asked(settings):
        yield _lenient(package, _TRACKERS[package](settings, out, step))


@contextmanager
def _lenient(package: str, tracker: AbstractContextManager[Track]) -> Iterator[Track]:
    """A tracker that has begun, and that ends no run, whatever it cannot be told."""
    track = tracker.__enter__()

    def write(step: int, numbers: Mapping[str, float], groups: Sequence[Group]) -> None:
        with _logged(f"step {step}", package):
            track(step, numbers, groups)

    try:
        yield write
    finally:
        with _logged("the end of the run", package):
            tracker.__exit__(*sys.exc_info())


@contextmanager
def _logged(what: str, package: str) -> Iterator[None]:
    """Log what a tracker cannot be told; metrics.jsonl has it."""
    try:
        yield
    except Exception as error:
        log.warning("%s is not in %s: %s: %s", what, package, type(error).__name__, error)


def _asked(settings: MetricsSettings) -> list[str]:
    return [package for package in _TRACKERS if getattr(settings, package)]


def rollouts(groups: Sequence[Group], count: int) -> list[TrackedRollout]:
    """Some of a step's recorded sessions: the best, the worst, and others spread evenly between them."""
    recorded = [
        (session, session.recording)
        for group in groups
        for session in group.samples
        if session.recording is not None and session.recording.completions
    ]
    recorded.sort(key=lambda one: one[0].reward if one[0].reward is not None else float("-inf"), reverse=True)
    count = min(count, len(recorded))
    places = [round(place * (len(recorded) - 1) / max(count - 1, 1)) for place in range(count)]
    return [_rollout(*recorded[place]) for place in places]


def _rollout(session: EndedSession, recording: Recording) -> TrackedRollout:
    first = recording.completions[0]
    prompt = "\n\n".join(f"[{message.role}] {_text(message)}" for message in first.messages)
    response = "\n\n".join(_text(completion.response) for completion in recording.completions)
    return TrackedRollout(
        session.result.session_id, session.reward, prompt[:LONGEST_TEXT], response[:LONGEST_TEXT]
    )


def _text(message: Message) -> str:
    calls = (f"{call.name}({call.arguments})" for call in message.tool_calls)
    return "\n".join(filter(None, (message.reasoning, message.content, *calls)))


@contextmanager
def _tensorboard(settings: MetricsSettings, out: Path, step: int) -> Iterator[Track]:
    from torch.utils.tensorboard import SummaryWriter

    def write(step: int, numbers: Mapping[str, float], groups: Sequence[Group]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        if shown := rollouts(groups, settings.rollouts):
            writer.add_text("rollouts", "\n\n---\n\n".join(map(_markdown, shown)), step)

    with closing(SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)) as writer:
        yield write


def _markdown(one: TrackedRollout) -> str:
    """Text as an indented block, so that nothing in it is taken for markup."""
    blocks = ("\n".join(f"    {line}" for line in text.splitlines()) for text in (one.prompt, one.response))
    return "\n\n".join((f"**{one.session}**: reward {one.reward}", *blocks))


@contextmanager
def _weights_and_biases(settings: MetricsSettings, out: Path, step: int) -> Iterator[Track]:
    wandb: Any = import_module("wandb")
    id = _keep_id(out / "wandb.id", lambda: secrets.token_hex(8))
    run = wandb.init(project=settings.wandb, name=out.name, id=id, dir=str(out), resume="allow")

    def write(step: int, numbers: Mapping[str, float], groups: Sequence[Group]) -> None:
        logged: dict[str, Any] = dict(numbers)
        if shown := rollouts(groups, settings.rollouts):
            logged["rollouts"] = wandb.Table(
                columns=list(TrackedRollout._fields), data=list(map(list, shown))
            )
        run.log(logged, step=step)

    try:
        yield write
    finally:
        run.finish()


@contextmanager
def _mlflow(settings: MetricsSettings, out: Path, step: int) -> Iterator[Track]:
    client: Any = import_module("mlflow").MlflowClient()
    found = client.get_experiment_by_name(settings.mlflow)
    experiment = found.experiment_id if found else client.create_experiment(settings.mlflow)
    id = _keep_id(out / "mlflow.id", lambda: client.create_run(experiment, run_name=out.name).info.run_id)

    def write(step: int, numbers: Mapping[str, float], groups: Sequence[Group]) -> None:
        for name, value in numbers.items():
            client.log_metric(id, name, value, step=step, synchronous=True)
        if shown := rollouts(groups, settings.rollouts):
            columns = dict(zip(TrackedRollout._fields, map(list, zip(*shown, strict=True)), strict=True))
            client.log_table(id, columns, f"rollouts/step-{step:06}.json")

    client.update_run(id, status="RUNNING")
    try:
        yield write
    except BaseException:
        client.set_terminated(id, status="FAILED")
        raise
    client.set_terminated(id)


@contextmanager
def _trackio(settings: MetricsSettings, out: Path, step: int) -> Iterator[Track]:
    trackio, pandas = import_module("trackio"), import_module("pandas")
    run: Any = trackio.init(project=settings.trackio, name=out.name, resume="allow")

    def write(step: int, numbers: Mapping[str, float], groups: Sequence[Group]) -> None:
        logged: dict[str, Any] = dict(numbers)
        if shown := rollouts(groups, settings.rollouts):
            logged["rollouts"] = trackio.Table(dataframe=pandas.DataFrame(shown))
        run.log(logged, step=step)

    try:
        yield write
    finally:
        run.finish()


def _keep_id(file: Path, make: Callable[[], str]) -> str:
    """An id that is kept with the run, so that one that goes on is one run there too."""
    if not file.exists():
        file.write_text(make())
    return file.read_text()


_TRACKERS: dict[str, Callable[[MetricsSettings, Path, int], AbstractContextManager[Track]]] = {
    "tensorboard": _tensorboard,
    "wandb": _weights_and_biases,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
"""By the name of their setting, which is that of their package."""
