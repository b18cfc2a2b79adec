"""`polar train`: GRPO through unmodified harnesses, and SFT on generated datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polar.cli.output import console, say
from polar.errors import InvalidInput
from polar.telemetry.logs import log_to_file

SFT = "sft"
INTERRUPTED = 130

Run = Annotated[
    list[str],
    typer.Argument(metavar="[sft] RUN.yaml", help="The run's settings; `sft` before it to fine-tune."),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The run's directory, instead of what the file says.")
]
Steps = Annotated[int | None, typer.Option(min=1, help="How many steps, instead of what the file says.")]
Seconds = Annotated[
    float | None, typer.Option(min=0.001, help="End with the step being made then; the same command goes on.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="The seed, instead of what the file says.")]
Sync = Annotated[
    bool, typer.Option("--sync", help="Roll out and train in turns; nothing is sampled while training.")
]


def train(
    run: Run,
    out: Out = None,
    steps: Steps = None,
    seconds: Seconds = None,
    seed: Seed = None,
    sync: Sync = False,
) -> None:
    """Train a policy.

    One YAML file is one run. Without `sft` it is GRPO: tasks are rolled out with the policy as it learns
    (`rollouts:`), or recordings are learnt from as they are (`recordings:`). With `sft` the policy is
    fine-tuned on datasets of `polar generate` (`data:`).

    DIR holds checkpoints and metrics.jsonl. Stopped at any moment, the same command goes on after the last
    checkpoint, exactly as if it had not been stopped. docs/training.md explains every setting.

    Examples:

      polar train examples/grpo-pi/tiny.yaml
      polar train sft sft.yaml --out runs/warm-start
    """
    path, is_sft = _path(run)
    try:
        from polar.training.run import train as carry_out
        from polar.training.settings import GrpoSettings, SftSettings, load_run
    except ImportError as error:
        raise InvalidInput(f"training needs {error.name}", hint="pip install 'polar-rl[train]'") from None

    settings = load_run(path, SftSettings if is_sft else GrpoSettings)
    changed = {"out": out, "steps": steps, "seconds": seconds, "seed": seed}
    settings = settings.model_copy(
        update={name: value for name, value in changed.items() if value is not None}
    )
    if sync:
        rollouts = getattr(settings, "rollouts", None)
        if rollouts is None:
            raise InvalidInput("--sync: this run rolls nothing out")
        in_turns = rollouts.model_copy(update={"synchronous": True})
        settings = settings.model_copy(update={"rollouts": in_turns})
    log_to_file(settings.out / "train.log", "info")
    try:
        kept = carry_out(settings, console(stderr=True))
    except KeyboardInterrupt:
        say("stopped; the same command goes on after the last checkpoint")
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(kept.path)


def _path(words: list[str]) -> tuple[Path, bool]:
    match words:
        case ["sft", path]:
            return Path(path), True
        case [path] if path != SFT:
            return Path(path), False
        case _:
            raise InvalidInput(
                "name one file of settings", hint="polar train RUN.yaml, polar train sft RUN.yaml"
            )
