"""Teaches a model a harness, arm by arm, and measures each on tasks that no arm has trained on.

    python examples/harnesses/learn.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --out runs/harnesses \\
        before rejection grpo
    python examples/harnesses/learn.py … --harness codex --engine-url http://127.0.0.1:8000 before
    python examples/harnesses/learn.py … --harness pi --harness codex --unseen qwen_code before rejection grpo

Every arm is commands of `polar`, shown as they run, each of which goes on where it was interrupted: so does
this one. What is measured is in files below --out, HARNESSES/ARM, and table.py makes the table of them.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

TRAIN, HELD_OUT = "train", "held_out"
RANK = 16
"""Of the adapter: small enough to bring back from a machine that is had for minutes."""
ARMS = ("pilot", "before", "taught", "rejection", "grpo", "shuffled", "per_request")
PUBLISHED, FIRST_ROUND = "published", "rejection-1"
"""What a GRPO run may begin with: weights that no arm has trained, and the usual."""
EPOCHS, ROWS = 4, 8
"""How often accepted sessions are read, and how many make a step."""
PER_TASK = 4
"""How many sessions of a task are learnt from: an easy one is solved each time, and teaches nothing more."""


@dataclass(frozen=True)
class Experiment:
    """Where it is kept, and what all of its commands have in common."""

    out: Path
    tasks: Path
    """A taskset with the splits `train` and `held_out`."""
    harnesses: tuple[str, ...]
    """Sessions are made through these: with several, each task has a group for each harness."""
    unseen: tuple[str, ...]
    """Evaluated beside them, and never trained through."""
    model: str
    engine_url: str | None
    tool_form: str | None
    """How the model writes calls, where it does not write them as its template asks."""
    runtime: str
    concurrency: int
    """Agents at once, of all nodes together."""
    nodes: int
    """Processes that run them: one starts and grades about ten sessions a second."""
    samples: int
    """Sessions of each held-out task."""
    tries: int
    """Sessions of each training task in a round of rejection sampling."""
    limit: int | None
    """The most tasks of a split; None: all."""
    seed: int
    """Of all that is drawn."""
    start: str
    """The arm whose weights a GRPO run begins with, or `published`."""
    demonstrations: Path | None
    """Sessions that `polar generate` made of training tasks with a teacher."""
    seconds: float | None
    """Of a GRPO run."""
    steps: int

    def directory(self, arm: str) -> Path:
        made = self.root / (f"{arm}-{self.seed}" if self.seed else arm)
        made.mkdir(parents=True, exist_ok=True)
        return made

    @property
    def root(self) -> Path:
        return self.out / "+".join(self.harnesses)

    def pilot(self) -> None:
        """The published weights on training tasks: by these, wordings and settings are chosen."""
        self.evaluate(self.directory("pilot"), None, TRAIN)

    def before(self) -> None:
        """The published weights."""
        self.evaluate(self.directory("before"), None)

    def taught(self) -> None:
        """The weights after demonstrations of training tasks: a warm start, and no policy's own doing."""
        if self.demonstrations is None:
            raise SystemExit("taught: name the teacher's sessions with --demonstrations")
        place = self.directory("taught")
        self.evaluate(place, self.fine_tune(place, [self.demonstrations]))

    def rejection(self, rounds: int = 1) -> None:
        """Of many tries the solved ones are learnt from; the next round tries with what was learnt."""
        weights: Path | None = None
        data: list[Path] = []
        for number in range(1, rounds + 1):
            place = self.directory(f"rejection-{number}")
            self.generate(place, weights)
            data.append(place / "data")
            weights = self.fine_tune(place, data)
            self.evaluate(place, weights)

    def grpo(self) -> None:
        """Reinforcement learning from where another arm ended."""
        self.reinforced("grpo")

    def shuffled(self) -> None:
        """The same with each group's rewards dealt out anew: whatever rises is not learnt from them."""
        self.reinforced("shuffled", rewards="shuffled")

    def per_request(self) -> None:
        """The same with a trace for each model call: as good, and dearer."""
        self.reinforced("per-request", builder="per_request")

    def reinforced(self, arm: str, **changes: str) -> None:
        usual = self.start == FIRST_ROUND
        place = self.directory(arm if usual else f"{arm}-from-{self.start}")
        start = None if self.start == PUBLISHED else _weights(self.directory(self.start) / "sft")
        # A run of so many seconds would go on, and what is being measured is what it ended with.
        if not (place / "eval").exists():
            self.reinforce(place, start, **changes)
        self.evaluate(place, _weights(place / "run"))

    def evaluate(self, place: Path, weights: Path | None, split: str = HELD_OUT) -> None:
        tasks = _written(self.root / f"{split}.yaml", self.taskset(split))
        self.polar(
            *("eval", "-t", tasks, "--out", place / "eval", "--samples", self.samples),
            *(word for name in (*self.harnesses, *self.unseen) for word in ("--harness", name)),
            *("--seed", self.seed, "--temperature", 1, *self.rolled_out_with(weights)),
        )

    def generate(self, place: Path, weights: Path | None) -> None:
        tasksets = (word for path in self.tasks_to_learn() for word in ("-t", path))
        self.polar(
            *("generate", *tasksets, "--out", place / "data"),
            *("--samples", self.tries, "--seed", self.seed),
            *self.rolled_out_with(weights),
        )

    def fine_tune(self, place: Path, data: list[Path]) -> Path:
        rows = chosen(data, place / "tokens.parquet")
        settings = self.training(place / "sft", lr=2e-4, schedule="cosine") | {
            "steps": max(1, EPOCHS * rows // ROWS),
            "rows": ROWS,
            "data": [str((place / "tokens.parquet").absolute())],
        }
        self.polar("train", "sft", _written(place / "sft.yaml", settings))
        return _weights(place / "sft")

    def reinforce(
        self, place: Path, start: Path | None, *, rewards: str = "own", builder: str = "prefix_merging"
    ) -> None:
        settings = self.training(place / "run", lr=2e-4) | {
            "groups": 16,
            "objective": {"level": "token", "max_staleness": 2, "rewards": rewards},
            "rollouts": {
                "tasks": [str(path.absolute()) for path in self.tasks_to_learn(builder)],
                "samples": 8,
                "concurrency": self.concurrency // self.nodes,
                "config": str(self.system().absolute()),
            },
        }
        if start is not None:
            settings["model"]["start"] = str(start.absolute())
        limit = ("--seconds", self.seconds) if self.seconds else ()
        self.polar("train", _written(place / "run.yaml", settings), *limit)

    def training(self, out: Path, *, lr: float, schedule: str = "constant") -> dict[str, Any]:
        return {
            "out": str(out.absolute()),
            "steps": self.steps,
            "seed": self.seed,
            "model": {"name": self.model, "lora": {"rank": RANK, "alpha": 2 * RANK}},
            "optimizer": {"lr": lr, "schedule": schedule, "warmup_steps": 2},
            "batch": {"tokens": 16384},
            "checkpoint": {"every": 5, "keep": 2},
        }

    def tasks_to_learn(self, builder: str = "prefix_merging") -> list[Path]:
        """A file for each harness, with ids of their own where there are several."""
        written = []
        for harness in self.harnesses:
            document = self.taskset(TRAIN, harness=harness, builder=builder)
            if len(self.harnesses) > 1:
                document["template"] = document.get("template", {}) | {"id": f"{{{{ task.id }}}}-{harness}"}
            written.append(_written(self.root / f"{TRAIN}-{harness}-{builder}.yaml", document))
        return written

    def taskset(self, split: str, **defaults: Any) -> dict[str, Any]:
        """The taskset for a split: as published, with what a session may use."""
        document = yaml.safe_load(self.tasks.read_text()) | {"split": split}
        if self.limit is not None:
            document["limit"] = self.limit
        document["defaults"] = {
            **document.get("defaults", {}),
            "runtime": self.runtime,
            "budgets": {"run_seconds": 150, "max_completions": 8},
            "sampling": {"temperature": 1.0, "max_tokens": 768},
            **defaults,
        }
        return document

    def system(self) -> Path:
        """The settings of every system that is started: all agents at once, one engine."""
        document = {
            "engine": {"kind": "vllm", "mode": "tokens", "lora_rank": RANK}
            | ({"url": self.engine_url} if self.engine_url else {})
            | ({"tool_form": self.tool_form} if self.tool_form else {}),
            "node": {"count": self.nodes, "runtimes": [self.runtime], "ready_buffer": 16},
        }
        return _written(self.out / "polar.yaml", document)

    def rolled_out_with(self, weights: Path | None) -> list[object]:
        common = ["--model", self.model, "--concurrency", self.concurrency // self.nodes, "-c", self.system()]
        return [*common, *(("--weights", weights) if weights else ())]

    def polar(self, *arguments: object) -> None:
        command = [str(argument) for argument in arguments]
        print(f"$ polar {shlex.join(command)}", flush=True)
        subprocess.run([sys.executable, "-m", "polar", *command], check=True)


def chosen(data: list[Path], into: Path) -> int:
    """Write the newest accepted sessions of each task, at most so many; how many rows that makes."""
    tables = [pq.read_table(one / "tokens.parquet") for one in reversed(data)]
    sessions: dict[str, set[tuple[int, str]]] = defaultdict(set)
    kept, row = [], -1
    for number, table in enumerate(tables):
        for task, session in zip(table["task"].to_pylist(), table["session"].to_pylist(), strict=True):
            row += 1
            # A session may have several conversations, a row each.
            if (number, session) in sessions[task] or len(sessions[task]) < PER_TASK:
                sessions[task].add((number, session))
                kept.append(row)
    if not kept:
        raise SystemExit(f"{data[-1]}: no session has solved its task; try more often (--tries)")
    pq.write_table(pa.concat_tables(tables).take(kept), into)
    return len(kept)


def _weights(run: Path) -> Path:
    """Of a run's last checkpoint."""
    found = max(run.glob("checkpoints/step-*/weights"), default=None)
    if found is None:
        raise SystemExit(f"{run} holds no weights: run the arm that makes them first")
    return found


def _written(path: Path, document: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("arms", nargs="+", choices=ARMS)
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-1.5B-Instruct", help="a directory or hub id")
    parser.add_argument(
        "--harness", dest="harnesses", action="append", help="to learn; repeatable (default: pi)"
    )
    parser.add_argument(
        "--unseen", action="append", default=[], help="a harness that is only evaluated; repeatable"
    )
    parser.add_argument("--tasks", type=Path, default=here.parent / "public-tasks" / "humaneval.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/harnesses"))
    parser.add_argument("--engine-url", help="a running vLLM that takes adapters; else one is started")
    parser.add_argument("--tool-form", default="fenced", help="how the model writes calls (engine.tool_form)")
    parser.add_argument("--runtime", default="bubblewrap")
    parser.add_argument("--concurrency", type=int, default=128, help="agents at once")
    parser.add_argument("--nodes", type=int, default=4, help="processes that run agents")
    parser.add_argument("--samples", type=int, default=8, help="of each held-out task")
    parser.add_argument("--tries", type=int, default=16, help="at each training task, in a round")
    parser.add_argument("--limit", type=int, help="the most tasks of a split, for a small run")
    parser.add_argument("--rounds", type=int, default=1, help="of rejection sampling")
    parser.add_argument(
        "--start", default=FIRST_ROUND, help="what GRPO begins with: taught, rejection-N, or published"
    )
    parser.add_argument("--demonstrations", type=Path, help="a teacher's sessions, for the arm `taught`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="of a GRPO run")
    parser.add_argument("--seconds", type=float, help="after which a GRPO run ends")
    given = vars(parser.parse_args())
    arms, rounds = given.pop("arms"), given.pop("rounds")
    given["harnesses"] = tuple(given["harnesses"] or ["pi"])
    given["unseen"] = tuple(given["unseen"])
    experiment = Experiment(**given)
    for arm in arms:
        if arm == "rejection":
            experiment.rejection(rounds)
        else:
            getattr(experiment, arm)()


if __name__ == "__main__":
    main()
