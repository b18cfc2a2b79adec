r"""Teaches a model a harness, arm by arm, and evaluates each arm on held-out tasks.

    python examples/harnesses/learn.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --out runs/harnesses \
        before rejection grpo
    python examples/harnesses/learn.py … --harness codex --engine-url http://127.0.0.1:8000 before
    python examples/harnesses/learn.py … --harness pi --harness codex --unseen qwen_code before rejection grpo

Every arm runs `polar` commands, printed as they run, which resume where they were interrupted; so does this
script. Results are below --out in HARNESSES/ARM, and table.py makes a table of them.
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
"""The adapter's rank, small enough to copy from a machine that is rented by the minute."""
ARMS = ("pilot", "before", "taught", "rejection", "grpo", "shuffled", "per_request", "branched")
PUBLISHED, TAUGHT, FIRST_ROUND = "published", "taught", "rejection-1"
"""What a GRPO run may start with: the published weights, demonstrations, or by default the first round's."""
EPOCHS, ROWS = 4, 8
"""The number of passes over accepted sessions, and of rows per step."""
PER_TASK = 4
"""Maximum number of sessions learned from per task, since solving an easy one again teaches nothing."""


@dataclass(frozen=True)
class Experiment:
    """The experiment's directory, and what all its commands share."""

    out: Path
    tasks: Path
    """A taskset with the splits `train` and `held_out`."""
    harnesses: tuple[str, ...]
    """The harnesses to train through; with several, each task has a group per harness."""
    unseen: tuple[str, ...]
    """Harnesses that are evaluated but never trained through."""
    model: str
    engine_url: str | None
    tool_form: str | None
    """How the model writes calls, if not as its template asks."""
    runtime: str
    concurrency: int
    """Maximum number of agents at once, over all nodes."""
    nodes: int
    """The number of node processes; one starts and grades about ten sessions per second."""
    samples: int
    """Number of sessions per held-out task."""
    tries: int
    """Number of sessions per training task in a round of rejection sampling."""
    limit: int | None
    """Maximum number of tasks per split; all if unset."""
    seed: int
    start: str
    """The arm that a GRPO run starts with, or `published`; with `taught`, rejection sampling does too."""
    demonstrations: Path | None
    """Sessions of training tasks that `polar generate` made with a teacher."""
    seconds: float | None
    """Time limit of a GRPO run."""
    steps: int

    def directory(self, arm: str) -> Path:
        made = self.root / (f"{arm}-{self.seed}" if self.seed else arm)
        made.mkdir(parents=True, exist_ok=True)
        return made

    @property
    def root(self) -> Path:
        return self.out / "+".join(self.harnesses)

    def pilot(self) -> None:
        """Evaluate the published weights on training tasks, to choose wordings and settings."""
        self.evaluate(self.directory("pilot"), None, TRAIN)

    def before(self) -> None:
        """Evaluate the published weights."""
        self.evaluate(self.directory("before"), None)

    def taught(self) -> None:
        """Fine-tune on demonstrations of training tasks: a warm start."""
        if self.demonstrations is None:
            raise SystemExit("taught: requires the teacher's sessions, --demonstrations")
        place = self.directory("taught")
        self.evaluate(place, self.fine_tune(place, [self.demonstrations]))

    def rejection(self, rounds: int = 1) -> None:
        """Fine-tune on the solved attempts out of many; the next round attempts with the result."""
        start = self.start_weights() if self.start == TAUGHT else None
        weights, data = start, list[Path]()
        for number in range(1, rounds + 1):
            place = self.directory(f"rejection-from-{TAUGHT}-{number}" if start else f"rejection-{number}")
            self.generate(place, weights)
            data.append(place / "data")
            weights = self.fine_tune(place, data, start)
            self.evaluate(place, weights)

    def grpo(self) -> None:
        """Train with reinforcement learning, starting from another arm."""
        self.reinforce_from_start("grpo")

    def shuffled(self) -> None:
        """Train like `grpo` with rewards shuffled within each group: the control for what rewards teach."""
        self.reinforce_from_start("shuffled", rewards="shuffled")

    def per_request(self) -> None:
        """Train like `grpo` with one trace per model call: equally good, but more expensive."""
        self.reinforce_from_start("per-request", builder="per_request")

    def branched(self) -> None:
        """Train like `grpo`, with half the samples and two branches of each where it was least certain."""
        branching = {"at": {"name": "entropy", "options": {"count": 1}}, "samples": 2}
        self.reinforce_from_start("branched", samples=4, advantage="tree", branching=branching)

    def reinforce_from_start(self, arm: str, **changes: Any) -> None:
        place = self.directory(arm if self.start == FIRST_ROUND else f"{arm}-from-{self.start}")
        start = self.start_weights()
        # A time-limited run would continue, but its final weights are being measured.
        if not (place / "eval").exists():
            self.reinforce(place, start, **changes)
        self.evaluate(place, _weights(place / "run"))

    def start_weights(self) -> Path | None:
        return None if self.start == PUBLISHED else _weights(self.directory(self.start) / "sft")

    def evaluate(self, place: Path, weights: Path | None, split: str = HELD_OUT) -> None:
        tasks = _write_yaml(self.root / f"{split}.yaml", self.taskset(split))
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

    def fine_tune(self, place: Path, data: list[Path], start: Path | None = None) -> Path:
        rows = write_chosen(data, place / "tokens.parquet")
        settings = self.training(place / "sft", start, lr=2e-4, schedule="cosine") | {
            "steps": max(1, EPOCHS * rows // ROWS),
            "rows": ROWS,
            "data": [str((place / "tokens.parquet").absolute())],
        }
        self.polar("train", "sft", _write_yaml(place / "sft.yaml", settings))
        return _weights(place / "sft")

    def reinforce(
        self,
        place: Path,
        start: Path | None,
        *,
        rewards: str = "own",
        advantage: str = "group",
        samples: int = 8,
        **tasks: Any,
    ) -> None:
        settings = self.training(place / "run", start, lr=2e-4) | {
            "groups": 16,
            "objective": {
                "level": "token",
                "max_staleness": 2,
                "rewards": rewards,
                "advantage": advantage,
            },
            "rollouts": {
                "tasks": [str(path.absolute()) for path in self.tasks_to_learn(**tasks)],
                "samples": samples,
                "concurrency": self.concurrency // self.nodes,
                "config": str(self.system().absolute()),
            },
        }
        limit = ("--seconds", self.seconds) if self.seconds else ()
        self.polar("train", _write_yaml(place / "run.yaml", settings), *limit)

    def training(
        self, out: Path, start: Path | None, *, lr: float, schedule: str = "constant"
    ) -> dict[str, Any]:
        begun = {"start": str(start.absolute())} if start else {}
        return {
            "out": str(out.absolute()),
            "steps": self.steps,
            "seed": self.seed,
            "model": {"name": self.model, "lora": {"rank": RANK, "alpha": 2 * RANK}, **begun},
            "optimizer": {"lr": lr, "schedule": schedule, "warmup_steps": 2},
            "batch": {"tokens": 16384},
            "checkpoint": {"every": 5, "keep": 2},
        }

    def tasks_to_learn(self, **defaults: Any) -> list[Path]:
        """Write a task file per harness, with distinct ids if there are several."""
        written = []
        kind = "-branched" if "branching" in defaults else ""
        builder = defaults.setdefault("builder", "prefix_merging")
        for harness in self.harnesses:
            document = self.taskset(TRAIN, harness=harness, **defaults)
            if len(self.harnesses) > 1:
                document["template"] = document.get("template", {}) | {"id": f"{{{{ task.id }}}}-{harness}"}
            written.append(_write_yaml(self.root / f"{TRAIN}-{harness}-{builder}{kind}.yaml", document))
        return written

    def taskset(self, split: str, **defaults: Any) -> dict[str, Any]:
        """Return the taskset of a split, as published, with the limits of a session."""
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
        """Write the settings of every system that is started: all agents at once, one engine."""
        document = {
            "engine": {"kind": "vllm", "mode": "tokens", "lora_rank": RANK}
            | ({"url": self.engine_url} if self.engine_url else {})
            | ({"tool_form": self.tool_form} if self.tool_form else {}),
            "node": {"count": self.nodes, "runtimes": [self.runtime], "ready_buffer": 16},
        }
        return _write_yaml(self.out / "polar.yaml", document)

    def rolled_out_with(self, weights: Path | None) -> list[object]:
        common = ["--model", self.model, "--concurrency", self.concurrency // self.nodes, "-c", self.system()]
        return [*common, *(("--weights", weights) if weights else ())]

    def polar(self, *arguments: object) -> None:
        command = [str(argument) for argument in arguments]
        print(f"$ polar {shlex.join(command)}", flush=True)
        subprocess.run([sys.executable, "-m", "polar", *command], check=True)


def write_chosen(data: list[Path], into: Path) -> int:
    """Write the newest accepted sessions of each task, up to PER_TASK; return the number of rows."""
    tables = [pq.read_table(one / "tokens.parquet") for one in reversed(data)]
    sessions: dict[str, set[tuple[int, str]]] = defaultdict(set)
    kept, row = [], -1
    for number, table in enumerate(tables):
        for task, session in zip(table["task"].to_pylist(), table["session"].to_pylist(), strict=True):
            row += 1
            # A session may have several conversations, with one row each.
            if (number, session) in sessions[task] or len(sessions[task]) < PER_TASK:
                sessions[task].add((number, session))
                kept.append(row)
    if not kept:
        raise SystemExit(f"{data[-1]}: no session solved its task; increase --tries")
    pq.write_table(pa.concat_tables(tables).take(kept), into)
    return len(kept)


def _weights(run: Path) -> Path:
    """Return the weights of a run's last checkpoint."""
    found = max(run.glob("checkpoints/step-*/weights"), default=None)
    if found is None:
        raise SystemExit(f"{run} has no weights: first run the arm that makes them")
    return found


def _write_yaml(path: Path, document: dict[str, Any]) -> Path:
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
        "--harness", dest="harnesses", action="append", help="to train through; repeatable (default: pi)"
    )
    parser.add_argument(
        "--unseen", action="append", default=[], help="a harness that is only evaluated; repeatable"
    )
    parser.add_argument("--tasks", type=Path, default=here.parent / "public-tasks" / "humaneval.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/harnesses"))
    parser.add_argument("--engine-url", help="a running vLLM that loads adapters (default: start one)")
    parser.add_argument("--tool-form", default="fenced", help="how the model writes calls (engine.tool_form)")
    parser.add_argument("--runtime", default="bubblewrap")
    parser.add_argument("--concurrency", type=int, default=128, help="maximum number of agents")
    parser.add_argument("--nodes", type=int, default=4, help="number of node processes")
    parser.add_argument("--samples", type=int, default=8, help="sessions per held-out task")
    parser.add_argument("--tries", type=int, default=16, help="sessions per training task in a round")
    parser.add_argument("--limit", type=int, help="maximum number of tasks per split, for a small run")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of rejection sampling")
    parser.add_argument(
        "--start",
        default=FIRST_ROUND,
        help="what GRPO starts with: taught (then rejection sampling does too), rejection-N, or published",
    )
    parser.add_argument("--demonstrations", type=Path, help="a teacher's sessions, for the arm `taught`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="steps of a GRPO run")
    parser.add_argument("--seconds", type=float, help="time limit of a GRPO run")
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
