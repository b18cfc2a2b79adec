"""Chooses the warm start's checkpoint for GRPO: the first that solves enough of the tasks.

    python examples/grpo-pi/choose.py examples/grpo-pi/gpu.yaml runs/warm-start
    python examples/grpo-pi/choose.py examples/grpo-pi/gpu.yaml runs/long-sft --held-out

It measures on training tasks, so that the held-out ones stay unseen, and creates the link
`runs/warm-start/chosen`. A policy that always fails has nothing to compare, and one that never fails nothing
to learn: somewhat below one half is a good start. Later checkpoints solve more, so it searches by bisection.

With `--held-out` nothing is chosen: every checkpoint is measured on the run's held-out tasks, which shows how
far the teacher's data alone leads (the control for GRPO).
"""

from __future__ import annotations

import argparse
import json
import shutil
from bisect import bisect_left
from functools import partial
from pathlib import Path

from polar.app.own_system import DATA
from polar.client import AsyncClient, Client
from polar.tasksets.files import load_tasks
from polar.training.rollouts import HeldOut
from polar.training.run import server_beside_trainer
from polar.training.settings import GrpoSettings, HeldOutSettings, load_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="settings of the GRPO run")
    parser.add_argument("warm_start", type=Path, help="directory of the SFT run")
    parser.add_argument("--enough", type=float, default=0.4, help="fraction of sessions to be solved")
    parser.add_argument("--tasks", type=int, default=78, help="number of tasks to measure on")
    parser.add_argument(
        "--samples", type=int, help="sessions per task (default: 2, or the run's for held-out tasks)"
    )
    parser.add_argument("--held-out", action="store_true", help="measure all checkpoints on held-out tasks")
    asked = parser.parse_args()
    settings = load_run(asked.run, GrpoSettings).model_copy(update={"out": asked.warm_start / "choice"})
    rollouts = settings.rollouts
    assert rollouts is not None
    held_out = rollouts.held_out
    if asked.held_out and held_out is None:
        parser.error(f"{asked.run} has no held_out tasks")
    if asked.held_out and held_out is not None:
        tasks, samples = load_tasks(*held_out.tasks), asked.samples or held_out.samples
    else:
        tasks, samples = load_tasks(*rollouts.tasks)[: asked.tasks], asked.samples or 2
    # Step 0 is the published model.
    checkpoints = sorted(asked.warm_start.glob("checkpoints/step-*/weights"))
    weights = settings.out / DATA / "weights"
    with (
        server_beside_trainer(settings, rollouts, tasks, print) as place,
        Client(place.url, place.token) as client,
        (asked.warm_start / ("held-out.jsonl" if asked.held_out else "choice.jsonl")).open(
            "w", buffering=1
        ) as told,
    ):
        measured = HeldOutSettings(tasks=rollouts.tasks, samples=samples)
        trials = HeldOut(measured, partial(AsyncClient, place.url, place.token), tasks, settings)

        def solve_rate(checkpoint: Path) -> float:
            name = checkpoint.parent.name
            shutil.copytree(checkpoint, weights / name, dirs_exist_ok=True)
            client.update_policy((weights / name).absolute())
            share = trials(int(name.removeprefix("step-")), True)["held_out_success"]
            told.write(json.dumps({"checkpoint": name, "solved": share}) + "\n")
            print(f"{name}: {share:.1%} of {len(tasks)} tasks", flush=True)
            return share

        if asked.held_out:
            for checkpoint in checkpoints:
                solve_rate(checkpoint)
            return
        enough = bisect_left(checkpoints, asked.enough, key=solve_rate)
    chosen = asked.warm_start / "chosen"
    chosen.unlink(missing_ok=True)
    chosen.symlink_to(checkpoints[min(enough, len(checkpoints) - 1)].relative_to(asked.warm_start))


if __name__ == "__main__":
    main()
