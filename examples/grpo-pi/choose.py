"""Chooses which checkpoint of the warm start GRPO begins with: the first that solves enough of the tasks.

    python examples/grpo-pi/choose.py examples/grpo-pi/gpu.yaml runs/warm-start

It asks for tasks that are trained on, so the held-out ones stay unseen, and leaves the link
`runs/warm-start/chosen`. A policy that always fails has nothing to compare, and one that never does nothing
to learn: about a third is a good beginning.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from polar.client import Client
from polar.generation.place import DATA
from polar.tasksets.files import load_tasks
from polar.training.rollouts import HeldOut
from polar.training.server import rollout_server
from polar.training.settings import GrpoSettings, load_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the GRPO run's settings")
    parser.add_argument("warm_start", type=Path, help="the directory of the SFT run")
    parser.add_argument("--enough", type=float, default=0.35, help="share of tasks solved")
    parser.add_argument("--tasks", type=int, default=78, help="how many are asked for")
    asked = parser.parse_args()
    settings = load_run(asked.run, GrpoSettings).model_copy(update={"out": asked.warm_start / "choice"})
    rollouts = settings.rollouts
    assert rollouts is not None
    tasks = load_tasks(*rollouts.tasks)[: asked.tasks]
    # The first is the model as it was: step 0.
    checkpoints = sorted(asked.warm_start.glob("checkpoints/step-*/weights"))
    weights = settings.out / DATA / "weights"
    with (
        rollout_server(settings, rollouts, tasks, print) as place,
        Client(place.url, place.token) as client,
        (asked.warm_start / "choice.jsonl").open("w", buffering=1) as told,
    ):
        for number, checkpoint in enumerate(checkpoints):
            copy = weights / checkpoint.parent.name
            shutil.copytree(checkpoint, copy, dirs_exist_ok=True)
            client.update_policy(copy.absolute())
            numbers = HeldOut(client, tasks, 1, settings.objective.temperature).numbers(number)
            solved = numbers["held_out_success"]
            told.write(json.dumps({"checkpoint": checkpoint.parent.name, "solved": solved}) + "\n")
            print(f"{checkpoint.parent.name}: {solved:.1%} of {len(tasks)} tasks", flush=True)
            if solved >= asked.enough:
                break
    chosen = asked.warm_start / "chosen"
    chosen.unlink(missing_ok=True)
    chosen.symlink_to(checkpoint.relative_to(asked.warm_start))


if __name__ == "__main__":
    main()
