"""Makes recorded sessions to train on: a real harness, its real prompts, a scripted policy.

    python -m benchmarks.training.sessions .offline/sessions --tasks 4 --samples 16
    python -m benchmarks.training.sessions .offline/long --tasks 2 --samples 4 --turns 101 --context 131072

Everything is real (sandbox, harness, gateway, capture, tools and their results, evaluator) but the engine,
which plays a script instead of sampling: its logprobs are made up. Tasks whose sessions are there are not
run again. Harnesses keep a share of their context free, so they are told of more than the sessions take.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.training.repairs import Repair, Turn, read_repair, turns, written
from polar.engines.base import GenerateRequest
from polar.evaluators.harbor_task import read_harbor_task
from polar.models.task import TaskSpec
from polar.recordings.recording import decode
from tests.fakes.scripted_engine import Answer
from tests.systems import System, system

SWE_MINI = Path(__file__).parents[2] / "examples" / "swe-mini" / "harbor"
FEWEST, MOST = 16, 30
"""Turns of a session."""
CHUNK = 64
"""Tokens that the scripted engine gives at once."""
SUMMARY = "The agent has read the package and its tests, has run them, and goes on with the repair."
SHELLS: dict[str, tuple[str, dict[str, object]]] = {
    "pi": ("bash", {}),
    "qwen_code": ("run_shell_command", {"is_background": False}),
    "claude_code": ("Bash", {"description": "A step of the repair"}),
}
"""Harness → the name of its shell tool, and arguments it wants beside the command."""


@dataclass
class Player:
    """Plays each session of a task a script of its own."""

    task: str
    repair: Repair
    harness: str
    fewest: int = FEWEST
    most: int = MOST
    system: System | None = None
    scripts: dict[str, list[Turn]] = field(default_factory=dict)
    """Session → the turns that are left of it."""

    def __call__(self, request: GenerateRequest) -> Answer:
        if request.session not in self.scripts:
            seed = f"{self.task}-{len(self.scripts)}"
            self.scripts[request.session] = list(turns(self.repair, seed, self.fewest, self.most))
        left = self.scripts[request.session]
        if not left or self._is_side_call(request):
            return Answer(SUMMARY, chunk=CHUNK)
        return Answer(written(left.pop(0), *SHELLS[self.harness]), chunk=CHUNK)

    def _is_side_call(self, request: GenerateRequest) -> bool:
        """Whether no shell is offered: a title, a summary."""
        assert self.system is not None
        prompt = self.system.engine.tokenizer.decode(list(request.prompt_ids))
        return SHELLS[self.harness][0] not in prompt


async def make(
    out: Path,
    tasks: list[Path],
    samples: int,
    harness: str,
    context: int,
    concurrency: int,
    length: int | None = None,
) -> None:
    """The sessions of each task in turn, kept as soon as a task is done; of `length` turns where given."""
    out.mkdir(parents=True, exist_ok=True)
    for directory in tasks:
        name = f"{harness}-{directory.name.removeprefix('swe-mini__')}"
        if len(list(out.glob(f"{name}-*"))) >= samples:
            continue
        task = read_harbor_task(directory)
        player = Player(name, read_repair(directory), harness, length or FEWEST, length or MOST)
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 1024}
        document = {"id": name, "harness": harness, "samples": samples, "sampling": sampling, **task.fields()}
        with tempfile.TemporaryDirectory() as data:
            async with system(Path(data), [player], max_context=context) as running:
                player.system = running
                await running.client.submit(TaskSpec.model_validate(document))
                async with running.node(run_slots=concurrency):
                    results = await running.client.wait([name], timeout=900)
                for result in results:
                    recording = await running.client.recording(result.session_id)
                    (out / f"{name}-{result.sample:02d}").write_bytes(recording)


def describe(out: Path) -> str:
    """What a directory of recordings holds, in a line."""
    found = [decode(path.read_bytes()) for path in sorted(out.iterdir())]
    calls = [len(one.completions) for one in found]
    lengths = [max(len(c.prompt_ids) + len(c.sampled_ids) for c in one.completions) for one in found]
    first = [len(one.completions[0].prompt_ids) for one in found]
    size = sum(path.stat().st_size for path in out.iterdir())
    rewards = [one.result.reward or 0.0 for one in found]
    return (
        f"{len(found)} sessions, {statistics.mean(calls):.1f} model calls each ({min(calls)}–{max(calls)}), "
        f"first prompt {statistics.mean(first):,.0f} tokens, longest context {max(lengths):,}, "
        f"mean reward {statistics.mean(rewards):.2f}, {size / 2**20:.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--harness", choices=sorted(SHELLS), default="pi")
    parser.add_argument("--turns", type=int, help=f"of each session, instead of {FEWEST} to {MOST}")
    parser.add_argument("--context", type=int, default=16_384, help="what the harness is told")
    parser.add_argument("--concurrency", type=int, default=4)
    asked = parser.parse_args()
    found = sorted(path.parent for path in SWE_MINI.glob("*/task.toml"))
    # Spread over the packages: neighbours are two bugs of one.
    tasks = [found[number * len(found) // asked.tasks] for number in range(asked.tasks)]
    asyncio.run(
        make(asked.out, tasks, asked.samples, asked.harness, asked.context, asked.concurrency, asked.turns)
    )
    print(describe(asked.out))


if __name__ == "__main__":
    main()
