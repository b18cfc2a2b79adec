"""Rehearses the published set-up on one GPU, or in small on a CPU: every process and every push of weights.

    python examples/published/rehearse.py runs/rehearsal

Random weights of Qwen3.5-4B's shape are served by vLLM, which `polar serve` starts, and trained by
`polar train` with the settings of pi.yaml. Pi works on small tasks whose first model calls are prescribed and
whose evaluator draws its rewards at random. Without a GPU the model is tiny and the engine the embedded one.
report.md and report.json say what ran; the exit code is 0 if everything that had to happen did.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from shape import SHAPES, write_shape

from polar.config.settings import EngineSettings
from polar.engines.process import on_this_machine
from polar.models.completion import CONSTRAINT, Completion
from polar.models.session import SessionStatus
from polar.recordings import recording
from polar.recordings.recording import Recording

HERE = Path(__file__).resolve().parent
MARK = "rehearsal"
"""A file by which a directory is known to be a rehearsal's."""
START_SECONDS = 900
STOP_SECONDS = 120
STOPPED = 128 + signal.SIGTERM
PEAKS = {"H200": 989.5e12, "H100": 989.5e12, "B200": 2250e12, "A100": 312e12}
"""Floating-point operations a second in bfloat16, dense, by what a GPU's name holds."""
COMMANDS = ("ls -la", "cat notes.md", "wc -c notes.md", "date > when.txt")
REWARD = """reward "$(od -An -N4 -tu4 /dev/urandom | awk '{print $1 / 4294967296}')" """


@dataclass(frozen=True)
class Size:
    """How much of everything there is."""

    context: int
    pass_tokens: int
    answer_tokens: int
    agents: int
    groups: int
    samples: int


ON_GPU = Size(context=16_384, pass_tokens=32_768, answer_tokens=512, agents=16, groups=4, samples=16)
ON_CPU = Size(context=16_384, pass_tokens=4096, answer_tokens=128, agents=2, groups=1, samples=2)
"""Pi sets most of a smaller context aside, and would ask for answers of a single token."""


@dataclass
class Report:
    """What ran, and what of it is not as it has to be."""

    numbers: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def demand(self, what: str, *, holds: bool) -> None:
        if not holds:
            self.faults.append(what)


def main() -> None:
    asked = arguments()
    # Ended from outside, too, it stops what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    out = emptied(asked.out.resolve())
    has_gpu = torch.cuda.is_available()
    size = ON_GPU if has_gpu else ON_CPU
    asked.groups, asked.samples = asked.groups or size.groups, asked.samples or size.samples
    seconds: dict[str, float] = {}
    model = asked.model or out / "model"
    with timed(seconds, "model"):
        if not model.is_dir():
            shape = asked.shape or ("qwen3.5-4b" if has_gpu else "tiny")
            write_shape(model, shape, asked.tokenizer, asked.layers)
    check_room(out, model)
    engine = write_settings(out, model, asked, size, has_gpu=has_gpu)
    with timed(seconds, "all"):
        with timed(seconds, "start"):
            server, url = start_server(out)
        try:
            with timed(seconds, "training"):
                code = train(out, url)
        finally:
            with timed(seconds, "stop"):
                stopped = stop(server)
    report = examined(out, asked, seconds)
    report.numbers["engine"] = engine
    report.demand(f"`polar train` ended with {code}", holds=code == 0)
    report.demand(f"`polar serve` ended with {stopped}", holds=stopped == STOPPED)
    write(report, out)
    print(f"{out / 'report.md'}: {'; '.join(report.faults) or 'everything held'}")
    raise SystemExit(bool(report.faults))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a directory for all of it; an earlier rehearsal is removed")
    parser.add_argument("--shape", choices=SHAPES, help="qwen3.5-4b where there is a GPU, else tiny")
    parser.add_argument("--layers", type=int, help="fewer of them, for less room: a multiple of 4")
    parser.add_argument(
        "--model", type=Path, help="where the model is, or else is written; default OUT/model"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="a directory with Qwen3's tokenizer; else it is fetched"
    )
    parser.add_argument("--weights", type=Path, help="where pushed weights lie; default OUT/weights")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--groups", type=int, help="of each step: 4 where there is a GPU, else 1")
    parser.add_argument("--samples", type=int, help="of each group: 16 where there is a GPU, else 2")
    parser.add_argument("--runtime", default=os.environ.get("RUNTIME", "bubblewrap"))
    return parser.parse_args()


def emptied(out: Path) -> Path:
    """Make the directory, without what an earlier rehearsal left in it."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise SystemExit(f"error: {out} has files that no rehearsal left: name another directory")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()
    return out


def check_room(out: Path, model: Path) -> None:
    """Refuse before minutes are spent: of each weight, which takes 2 bytes in the model, the first checkpoint
    keeps 4, and the last, with the optimizer, 12."""
    needed = 8 * sum(file.stat().st_size for file in model.glob("*.safetensors"))
    free = shutil.disk_usage(out).free
    if free < needed:
        raise SystemExit(
            f"error: checkpoints take {needed / 1e9:.0f} GB in {out}, which has {free / 1e9:.0f}"
        )


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - began, 1)


def write_settings(out: Path, model: Path, asked: argparse.Namespace, size: Size, *, has_gpu: bool) -> str:
    """Write the system's, the run's and the tasks' settings; return the engine's kind."""
    weights = (asked.weights or out / "weights").resolve()
    engine = {"model": str(model.resolve()), "max_context": size.context, "slots": size.agents}
    kind = on_this_machine(EngineSettings.model_validate(engine), print).kind
    if kind == "vllm":
        # The trainer needs most of the GPU. Without graphs vLLM is ready minutes sooner.
        engine |= {"gpu_memory": 0.25, "options": ["--enforce-eager", "--language-model-only"]}
        if "Qwen3_5" not in (model / "config.json").read_text():
            engine["options"] = ["--enforce-eager"]
    system = {
        "data_dir": str(out / "system"),
        "server": {"port": 0},
        "engine": engine | {"kind": kind, "mode": "tokens"},
        "node": {"runtimes": [asked.runtime], "run_slots": size.agents, "weight_roots": [str(weights)]},
    }
    run = yaml.safe_load((HERE / "pi.yaml").read_text())
    run |= {"out": str(out / "run"), "steps": asked.steps, "groups": asked.groups}
    run["model"] |= {"name": str(model.resolve()), "device": "cuda" if has_gpu else "cpu"}
    run["batch"] |= {"tokens": size.pass_tokens}
    run["checkpoint"] = {"every": asked.steps, "keep": 1}
    run["metrics"] = {}
    run["rollouts"] |= {"tasks": [str(out / "tasks.yaml")], "samples": asked.samples, "weights": str(weights)}
    del run["rollouts"]["server"]
    for name, document in (("polar", system), ("run", run), ("tasks", tasks(asked, size))):
        (out / f"{name}.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return kind


def tasks(asked: argparse.Namespace, size: Size) -> dict[str, Any]:
    """As many tasks as a step has groups: an agent looks around, writes a file, and says something."""

    def call(tool: str, **properties: Any) -> dict[str, Any]:
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {"tool": tool, "arguments": schema}

    notes = {f"notes-{number}": f"Note {number}.\n" * 20 for number in range(asked.groups)}
    calls = [
        call("bash", command={"enum": list(COMMANDS)}),
        call("read", path={"const": "notes.md"}),
        call("write", path={"const": "answer.md"}, content={"enum": ["yes", "no", "perhaps"]}),
    ]
    return {
        "defaults": {
            "harness": {"name": "pi", "options": {"compaction": False, "context_files": False}},
            "runtime": asked.runtime,
            "evaluator": {"name": "command", "options": {"command": REWARD}},
            "budgets": {"run_seconds": 600, "max_completions": 8},
            "sampling": {"temperature": 1.0, "max_tokens": size.answer_tokens, "calls": calls},
        },
        "tasks": [
            {
                "id": name,
                "instruction": "Read notes.md and write what you think of it into answer.md.",
                "files": {"notes.md": {"text": text}},
            }
            for name, text in notes.items()
        ],
    }


def start_server(out: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start `polar serve` with its engine and its node; return its address once it serves."""
    log = out / "serve.log"
    with log.open("wb") as written:
        command = [sys.executable, "-m", "polar", "serve", "--config", str(out / "polar.yaml")]
        server = subprocess.Popen(command, cwd=out, stdout=written, stderr=written)
    ends_at = time.monotonic() + START_SECONDS
    while time.monotonic() < ends_at and server.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("serving "):
                return server, line.split(" at ", 1)[1].split()[0]
        time.sleep(0.2)
    stop(server)
    raise SystemExit(f"`polar serve` did not start:\n{log.read_text(errors='replace')[-4000:]}")


def train(out: Path, url: str) -> int:
    token = (out / "system" / "token").read_text().strip()
    run = out / "run.yaml"
    document = yaml.safe_load(run.read_text())
    document["rollouts"]["server"] = url
    run.write_text(yaml.safe_dump(document, sort_keys=False))
    command = [sys.executable, "-m", "polar", "train", str(run)]
    return subprocess.run(command, cwd=out, env={**os.environ, "POLAR_TOKEN": token}, check=False).returncode


def stop(server: subprocess.Popen[bytes]) -> int:
    if server.poll() is None:
        server.terminate()
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def examined(out: Path, asked: argparse.Namespace, seconds: dict[str, float]) -> Report:
    """Read what the run has left, and hold it against what a run has to do."""
    report = Report()
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["step"] > 0]
    weights = pushed(Path(asked.weights or out / "weights"))
    recordings = [
        recording.decode(path.read_bytes())
        for path in sorted((out / "system" / "recordings").rglob("*"))
        if path.is_file() and recording.is_recording(path)
    ]
    model = Path(asked.model or out / "model")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report.numbers |= {
        "device": device,
        "model": json.loads((model / "config.json").read_text())["architectures"][0],
        "weights_pushed": weights,
        "sessions": sessions(recordings),
        "model_calls": model_calls(recordings),
        "tokens_by_version": tokens_by_version(recordings),
        "left_out": left_out(steps),
        "seconds": seconds,
        "steps": [of_step(step, weights["parameters"], device) for step in steps],
    }
    numbers, calls = report.numbers, report.numbers["model_calls"]
    report.demand(f"{len(steps)} of {asked.steps} steps were made", holds=len(steps) == asked.steps)
    report.demand("a step trained no token", holds=all(step["trained_tokens"] for step in steps))
    versions = [step["version"] for step in steps]
    report.demand(
        f"a push reached no engine: versions {versions}",
        holds=len(set(versions)) == len(versions) and versions == sorted(versions),
    )
    report.demand(
        "no token was sampled with pushed weights",
        holds=any(int(v) > 1 for v in numbers["tokens_by_version"]),
    )
    report.demand(
        f"{calls['prescribed'] - calls['well_formed']} prescribed calls are no calls",
        holds=0 < calls["prescribed"] == calls["well_formed"],
    )
    report.demand(f"sessions: {numbers['sessions']}", holds=set(numbers["sessions"]) == {"completed"})
    return report


def pushed(directory: Path) -> dict[str, Any]:
    """What the newest pushed weights are made of, as their files' headers say."""
    directories = sorted(directory.glob("polar-weights-*/*"), key=lambda path: path.stat().st_mtime)
    kinds: Counter[str] = Counter()
    parameters = 0
    for file in directories[-1].glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                kinds[tensor["dtype"]] += end - begin
                parameters += int(torch.Size(tensor["shape"]).numel())
    return {"parameters": parameters, "bytes_by_kind": dict(kinds)}


def sessions(recordings: list[Recording]) -> dict[str, int]:
    return dict(Counter(str(one.result.status) for one in recordings))


def model_calls(recordings: list[Recording]) -> dict[str, int]:
    calls = [completion for one in recordings for completion in one.completions]
    prescribed = [completion for completion in calls if CONSTRAINT in completion.extra]
    done = [one for one in recordings if one.result.status is SessionStatus.COMPLETED]
    return {
        "all": len(calls),
        "prescribed": len(prescribed),
        "well_formed": sum(is_one_call(completion) for completion in prescribed),
        "sampled_tokens": sum(len(completion.sampled_ids) for completion in calls),
        "sampled_in_prescribed_calls": sum(len(completion.sampled_ids) for completion in prescribed),
        "trainable_in_completed_sessions": sum(one.result.stats.trainable_tokens for one in done),
    }


def is_one_call(completion: Completion) -> bool:
    if len(completion.response.tool_calls) != 1:
        return False
    try:
        return isinstance(json.loads(completion.response.tool_calls[0].arguments), dict)
    except ValueError:
        return False


def tokens_by_version(recordings: list[Recording]) -> dict[str, int]:
    """How many sampled tokens carry each policy version."""
    found: Counter[int] = Counter()
    for one in recordings:
        for completion in one.completions:
            found.update(completion.policy_versions.tolist())
    return {str(version): found[version] for version in sorted(found)}


def left_out(steps: list[dict[str, float]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for step in steps:
        found.update(
            {n.removeprefix("excluded/"): int(v) for n, v in step.items() if n.startswith("excluded/")}
        )
    return dict(found)


def of_step(step: dict[str, float], parameters: int, device: str) -> dict[str, Any]:
    names = ("step", "version", "sessions", "reward", "loss", "behaviour_kl", "staleness", "tokens")
    names += ("trained_tokens",)
    names += ("collect_seconds", "learn_seconds", "push_seconds", "gpu_busy")
    numbers: dict[str, Any] = {name: step[name] for name in names if name in step}
    peak = next((peak for name, peak in PEAKS.items() if name in device), None)
    if peak is not None:
        # Two operations a weight forward and four backward; attention between tokens is not counted.
        numbers["mfu"] = 6 * parameters * step["tokens"] / step["learn_seconds"] / peak
    return numbers


def write(report: Report, out: Path) -> None:
    numbers = report.numbers
    (out / "report.json").write_text(json.dumps({"faults": report.faults, **numbers}, indent=2) + "\n")
    names = list(dict.fromkeys(name for step in numbers["steps"] for name in step))
    lines = [
        "# Rehearsal of the published set-up\n",
        f"{'; '.join(report.faults) or 'Everything held'}.\n",
        "| | |\n|---|---|",
        *(
            f"| {title.replace('_', ' ')} | {shown(numbers[title])} |"
            for title in numbers
            if title != "steps"
        ),
        f"\n| {' | '.join(name.replace('_', ' ') for name in names)} |\n|{'---|' * len(names)}",
        *(f"| {' | '.join(shown(step.get(name)) for name in names)} |" for step in numbers["steps"]),
    ]
    for name in ("collect_seconds", "learn_seconds", "push_seconds"):
        mean = fmean(step[name] for step in numbers["steps"]) if numbers["steps"] else 0.0
        lines.append(f"\nMean {name.replace('_', ' ')}: {mean:.1f}.")
    (out / "report.md").write_text("\n".join(lines) + "\n")


def shown(value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{name} {shown(one)}" for name, one in value.items())
        case list():
            return ", ".join(map(shown, value))
        case float():
            return f"{value:.4g}"
        case None:
            return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
