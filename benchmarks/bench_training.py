"""Training on the same recorded sessions laid out in three ways, and how faithful the trainer's logprobs are.

make bench-training                                       small, on a CPU; full size where there is a GPU
python -m benchmarks.bench_training --sessions DIR        other recordings
python -m benchmarks.bench_training --turns DIR           the same by the number of calls a session has
python -m benchmarks.bench_training --faithfulness DIR    recorded logprobs against the trainer's
python -m benchmarks.bench_training --faithfulness DIR --rescore    … against what the engine says of them now
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import machine
from benchmarks.training import faithfulness, models, turns
from benchmarks.training.figure import chart
from benchmarks.training.gradients import Agreement, compare_gradients
from benchmarks.training.layouts import LAYOUTS, ONE_A_PASS, read_recordings, reduced
from benchmarks.training.speed import Measurement, measure
from polar.app.stack import connect_engine
from polar.config.settings import DEFAULT_MODEL, load_settings
from polar.engines.base import WeightUpdate
from polar.recordings.recording import Recording
from polar.training.settings import Lora, ModelSettings
from polar.trajectory.packing.batch import TrainingRow

ROOT = Path(__file__).parents[1]
SESSIONS = ROOT / ".offline" / "sessions"
BUSY = 0.9
CALLS = 6
"""Of each session, on a CPU."""
IDENTICAL = "same sessions, weights, objective and token budget; one update with the gradient of all of them"


def main() -> None:
    asked = arguments()
    if asked.faithfulness:
        report_faithfulness(asked)
        return
    if asked.turns:
        report_turns(asked)
        return
    asked.model = asked.model or (DEFAULT_MODEL if torch.cuda.is_available() else "small")
    with tempfile.TemporaryDirectory() as scratch:
        recordings = sessions(asked, Path(scratch))
        model = model_settings(asked, Path(scratch) / "model")
        if asked.gradients:
            agreement = compare_gradients(pair(recordings), model, asked.budget)
            print(agreement)
            check_goals([], agreement)
            return
        measured = []
        for layout in (ONE_A_PASS, *LAYOUTS) if asked.model == "hybrid" else LAYOUTS:
            measured.append(measure(layout, recordings, model, asked.budget, asked.seconds))
            # Told as they come: the time on a borrowed GPU may end before the last.
            report_speed(asked, recordings, measured)
        agreement = compare_gradients(pair(recordings), model, asked.budget)
    report_speed(asked, recordings, measured, agreement)
    check_goals(measured, agreement)


def arguments() -> argparse.Namespace:
    is_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--sessions", type=Path, help="recordings; else .offline/sessions, else a few are made"
    )
    parser.add_argument("--model", help="a name or directory; `shape`, `small`, `hybrid`: random weights")
    parser.add_argument("--budget", type=int, default=32_768 if is_gpu else 4_096, help="tokens of a pass")
    parser.add_argument("--seconds", type=float, default=10.0 if is_gpu else 0.0, help="at least, a layout")
    parser.add_argument("--lora", type=int, help="train an adapter of this rank instead of all weights")
    parser.add_argument("--compile", action="store_true", help="compile the model's layers")
    parser.add_argument("--limit", type=int, help="so many sessions only")
    parser.add_argument("--gradients", action="store_true", help="only whether those of the layouts agree")
    parser.add_argument(
        "--turns", type=Path, metavar="DIR", help="recordings of long sessions, cut after 5 to 100 calls"
    )
    parser.add_argument("--calls", type=int, help="only so many model calls of each")
    parser.add_argument(
        "--name", default=f"training-{'gpu' if is_gpu else 'cpu'}", help="of the result files"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="where they go")
    parser.add_argument("--faithfulness", type=Path, metavar="DIR", help="recordings of a real engine")
    parser.add_argument(
        "--rescore", action="store_true", help="with it: by what the embedded engine says now"
    )
    parser.add_argument("--start", type=Path, help="with it: the weights or adapter they were sampled with")
    parser.add_argument("--version", type=int, help="with it: of which policy version; else the first")
    parser.add_argument("--temperature", type=float, default=1.0, help="with it: what was sampled at")
    return parser.parse_args()


def sessions(asked: argparse.Namespace, scratch: Path) -> list[Recording]:
    directory: Path | None = asked.sessions or (SESSIONS if SESSIONS.is_dir() else None)
    if directory is None or (asked.sessions is None and not torch.cuda.is_available()):
        from benchmarks.training.sessions import SWE_MINI, make

        directory = scratch / "sessions"
        task = sorted(path.parent for path in SWE_MINI.glob("*/task.toml"))[:1]
        asyncio.run(make(directory, task, samples=4, harness="pi", context=16_384, concurrency=2))
        asked.calls = asked.calls or CALLS
    recordings = read_recordings(directory)[: asked.limit]
    if not asked.calls:
        return recordings
    vocabulary = models.VOCABULARY if asked.model in ("small", "hybrid") else None
    return [reduced(one, asked.calls, vocabulary) for one in recordings]


def pair(recordings: Sequence[Recording]) -> list[Recording]:
    """Two sessions of one task that were rewarded differently: what a gradient is compared on."""
    for one in recordings:
        for other in recordings:
            if one.result.task_id == other.result.task_id and one.result.reward != other.result.reward:
                return [one, other]
    raise SystemExit("no task has sessions with different rewards: there is nothing to learn from")


def model_settings(asked: argparse.Namespace, scratch: Path) -> ModelSettings:
    name = asked.model
    match name:
        case "small":
            name = str(models.small_model(scratch))
        case "hybrid":
            name = str(models.hybrid_model(scratch))
        case "shape":
            name = str(models.default_shape(scratch))
    lora = Lora(rank=asked.lora, alpha=2 * asked.lora) if asked.lora else None
    return ModelSettings(name=name, lora=lora, compile=asked.compile, start=asked.start)


def report_speed(
    asked: argparse.Namespace,
    recordings: Sequence[Recording],
    measured: Sequence[Measurement],
    agreement: Agreement | None = None,
) -> None:
    told = [f"{len(recordings)} sessions, {_turns(recordings):.1f} model calls each on average"]
    told.append(f"{measured[0].trained_tokens:,} trained tokens, passes of {asked.budget:,} tokens")
    trained = f"an adapter of rank {asked.lora}" if asked.lora else "all weights"
    told.append(f"model {asked.model}{', compiled' if asked.compile else ''}, {trained}, {_device()}")
    if agreement is not None:
        told.append(str(agreement))
    header, rows = speed_rows(measured)
    if agreement is None:
        print(" · ".join(f"{name} {value}" for name, value in zip(header, rows[-1], strict=True)), flush=True)
    else:
        show("bench-training", header, rows, told)
    document = document_of(asked, told) | {
        "agreement": asdict(agreement) if agreement else None,
        "layouts": [asdict(one) | {"ratio": measured[0].seconds / one.seconds} for one in measured],
    }
    write(asked, document, "Training speed", [IDENTICAL, *told], header, rows)
    title = f"Training {len(recordings)} sessions, {_device()}"
    (asked.out / f"{asked.name}.svg").write_text(chart(title, measured))


def check_goals(measured: Sequence[Measurement], agreement: Agreement) -> None:
    missed = []
    if torch.cuda.is_available():
        # At a small size there is little to share: a CPU shows that the layouts learn the same.
        missed += [one.name for one in measured if one.goal and measured[0].seconds / one.seconds < one.goal]
    missed += [
        f"{one.name}: GPU busy" for one in measured if one.gpu_busy is not None and one.gpu_busy < BUSY
    ]
    if len({one.trained_tokens for one in measured}) > 1:
        missed.append("the layouts train different tokens")
    missed += agreement.missed
    if missed:
        raise SystemExit(f"missed: {', '.join(missed)}")


def speed_rows(measured: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    header = ["layout", "traces", "passes", "computed tokens", "s a step", "computed tok/s"]
    header += ["trained tok/s", "against per_request", "goal", "GPU busy", "peak GiB", "packing s"]
    header += ["loss", "gradient norm"]
    rows = [
        [
            one.name,
            f"{one.traces:,}",
            f"{one.passes:,}",
            f"{one.tokens:,}",
            f"{one.seconds:.2f}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.trained_per_second:,.0f}",
            f"{measured[0].seconds / one.seconds:.2f} ×",
            f"≥ {one.goal:g} ×" if one.goal else "",
            "" if one.gpu_busy is None else f"{100 * one.gpu_busy:.0f} %",
            "" if one.peak_gib is None else f"{one.peak_gib:.1f}",
            f"{one.pack_seconds:.1f}",
            f"{one.loss:.5g}",
            f"{one.grad_norm:.5g}",
        ]
        for one in measured
    ]
    return header, rows


def report_turns(asked: argparse.Namespace) -> None:
    asked.model = asked.model or ("shape" if torch.cuda.is_available() else "small")
    asked.name = f"{asked.name}-turns"
    recordings = read_recordings(asked.turns)[: asked.limit]
    told = [IDENTICAL, f"{len(recordings)} sessions, passes of {asked.budget:,} tokens"]
    told.append(f"model {asked.model}, all weights, {_device()}")
    header = ["model calls a session", "trained tokens", "per_request s a step"]
    header += [layout.name for layout in turns.ALL[1:]]
    vocabulary = models.VOCABULARY if asked.model == "small" else None
    points: list[turns.Point] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = model_settings(asked, Path(scratch) / "model")
        for point in turns.curve(recordings, model, asked.budget, asked.seconds, vocabulary):
            points.append(point)
            rows = [turn_row(one) for one in points]
            print(" · ".join(f"{name} {value}" for name, value in zip(header, rows[-1], strict=True)))
            document = document_of(asked, told) | {"points": [asdict(one) for one in points]}
            write(asked, document, "Training speed by the length of sessions", told, header, rows)
    show("bench-training --turns", header, rows, told)


def turn_row(point: turns.Point) -> list[str]:
    first, *others = point.measured
    cells = [
        f"{ratio:.2f} × ({one.tokens / one.trained_tokens:.1f} computed a trained token)"
        for one, ratio in zip(others, point.ratios[1:], strict=True)
    ]
    return [str(point.calls), f"{first.trained_tokens:,}", f"{first.seconds:.2f}", *cells]


def report_faithfulness(asked: argparse.Namespace) -> None:
    recordings = read_recordings(asked.faithfulness)[: asked.limit]
    counted = faithfulness.versions(recordings)
    version = min(counted) if asked.version is None else asked.version
    lora = Lora() if asked.start and (asked.start / "adapter_config.json").is_file() else None
    model = ModelSettings(name=asked.model or DEFAULT_MODEL, start=asked.start, lora=lora)
    rows = faithfulness.compared(recordings, version, asked.temperature)
    told = [
        f"{len(recordings)} sessions; tokens by policy version {counted}, compared: version {version}",
        f"model {model.name}, weights {asked.start or 'its own'}, trainer on {_device()}",
    ]
    if asked.rescore:
        rows = asyncio.run(rescored(rows, model))
        told.append("the embedded engine was shown the sessions and asked how likely it holds their tokens")
    found = [
        faithfulness.compare(rows, model, precision, asked.budget, asked.temperature)
        for precision in ("float32", "bfloat16")
    ]
    header = ["trainer computes in", "tokens", "mean difference", "99 % below", "largest"]
    header += ["ratio from 1, mean"]
    cells = [
        [
            one.precision,
            f"{one.tokens:,}",
            *(f"{value:.2e}" for value in (one.mean, one.p99, one.max, one.ratio)),
        ]
        for one in found
    ]
    show("faithfulness", header, cells, told)
    document = document_of(asked, told) | {"precisions": [asdict(one) for one in found]}
    asked.name = asked.name.replace("training", "faithfulness")
    write(asked, document, "Faithfulness of the trainer's logprobs", told, header, cells)


async def rescored(rows: Sequence[TrainingRow], model: ModelSettings) -> list[TrainingRow]:
    """The rows with the logprobs of the embedded engine with the same weights, started for this."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = load_settings(None, {"data_dir": scratch, "engine": {"model": model.name}})
        async with connect_engine(settings, print) as engine:
            if model.start is not None:
                await engine.update_weights(WeightUpdate(1, str(model.start.absolute())))
            return await faithfulness.rescored(rows, engine)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], told: Sequence[str]) -> None:
    table = Table(title=title, title_justify="left", caption="\n".join(told), caption_justify="left")
    for column in header:
        table.add_column(column, justify="left" if column == header[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def document_of(asked: argparse.Namespace, told: Sequence[str]) -> dict[str, Any]:
    """What every file of numbers says of where they come from."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(asked),
        "machine": machine() | {"device": _device(), "torch": torch.__version__},
        "about": list(told),
    }


def write(
    asked: argparse.Namespace,
    document: dict[str, Any],
    title: str,
    told: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> None:
    """The same as JSON and as a page."""
    numbers = asked.out / asked.name / "numbers.json"
    numbers.parent.mkdir(parents=True, exist_ok=True)
    numbers.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    lines = [f"# {title}", "", *(f"- {line}" for line in told), f"- `{document['command']}`", ""]
    lines += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    (asked.out / f"{asked.name}.md").write_text("\n".join(lines) + "\n")


def command(asked: argparse.Namespace) -> str:
    """What was asked for, without where its results went."""
    words = [word for word in sys.argv[1:] if word not in ("--out", str(asked.out))]
    return " ".join(["python -m benchmarks.bench_training", *words])


def _turns(recordings: Sequence[Recording]) -> float:
    return sum(len(one.completions) for one in recordings) / len(recordings)


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main()
