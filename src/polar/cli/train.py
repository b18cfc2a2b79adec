"""`polar train`: GRPO through unmodified harnesses, and SFT on generated datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polar.cli.output import console, say
from polar.errors import InvalidInput
from polar.files import make_directory
from polar.telemetry.logs import log_to_file

SFT = "sft"
INTERRUPTED = 130

Run = Annotated[
    list[str],
    typer.Argument(metavar="[sft] RUN.yaml", help="Settings of the run; put `sft` before it to fine-tune."),
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the run, overriding the file's.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Number of steps, overriding the file's.")]
Seconds = Annotated[
    float | None,
    typer.Option(min=0.001, help="Stop after the step that is running then; the same command resumes."),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed, overriding the file's.")]
Sync = Annotated[
    bool,
    typer.Option(
        "--sync", help="Alternate between rollouts and training, instead of sampling while training."
    ),
]
Processes = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Number of processes on this machine to train with, one per GPU."),
]


def train(
    run: Run,
    out: Out = None,
    steps: Steps = None,
    seconds: Seconds = None,
    seed: Seed = None,
    sync: Sync = False,
    processes: Processes = 1,
) -> None:
    """Train a policy.

    One YAML file is one run. Without `sft` it is GRPO: tasks are rolled out with the policy as it learns
    (`rollouts:`), or existing recordings are learned from (`recordings:`). With `sft`, the policy is
    fine-tuned on datasets of `polar generate` (`data:`).

    DIR gets checkpoints and metrics.jsonl. If the run is interrupted, the same command resumes it after the
    last checkpoint, with the same outcome as without the interruption. docs/training.md explains every
    setting.

    Examples:

      polar train examples/grpo-pi/tiny.yaml
      polar train sft sft.yaml --out runs/warm-start

      polar train run.yaml --processes 8

      torchrun --nproc-per-node 8 -m polar train run.yaml
    """
    from polar.training.settings import GrpoSettings, SftSettings, load_run

    path, is_sft = _path(run)
    # Before torch is imported, which takes seconds.
    settings = load_run(path, SftSettings if is_sft else GrpoSettings)
    try:
        from polar.training.run import train as carry_out
    except ImportError as error:
        raise InvalidInput(f"training requires {error.name}", hint="pip install 'polar-rl[train]'") from None

    changed = {"out": out, "steps": steps, "seconds": seconds, "seed": seed}
    settings = settings.model_copy(
        update={name: value for name, value in changed.items() if value is not None}
    )
    if sync:
        rollouts = getattr(settings, "rollouts", None)
        if rollouts is None:
            raise InvalidInput("--sync: this run has no rollouts")
        in_turns = rollouts.model_copy(update={"synchronous": True})
        settings = settings.model_copy(update={"rollouts": in_turns})
    make_directory(settings.out)
    log_to_file(settings.out / "train.log", "info")
    try:
        kept = carry_out(settings, console(stderr=True), processes)
    except KeyboardInterrupt:
        say("stopped; run the same command to resume after the last checkpoint")
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
                "expected one settings file", hint="polar train RUN.yaml, or polar train sft RUN.yaml"
            )
