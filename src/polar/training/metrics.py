"""A run's numbers: a table in the terminal, metrics.jsonl, TensorBoard or W&B if asked for; GPU usage."""

from __future__ import annotations

import ctypes
import json
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

import torch

from polar.errors import NotInstalled
from polar.training.settings import MetricsSettings

if TYPE_CHECKING:
    from rich.console import Console

FILE = "metrics.jsonl"
COLUMNS = (
    "reward",
    "held_out_success",
    "loss",
    "entropy",
    "kl",
    "clip_fraction",
    "tis_fraction",
    "staleness",
    "tokens_per_second",
    "gpu_busy",
)
"""Numbers shown in the terminal; the file has them all."""
LINES = 20
"""Number of steps shown in the terminal."""
NVML = "libnvidia-ml.so.1"
SAMPLE_SECONDS = 0.1
"""The driver averages over the last sixth of a second to a second, depending on the GPU."""


Write = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its numbers."""


def require(settings: MetricsSettings) -> None:
    """Raise if a package for the requested metrics is missing."""
    for package, is_asked in (("tensorboard", settings.tensorboard), ("wandb", settings.wandb is not None)):
        if is_asked and find_spec(package) is None:
            raise NotInstalled(f"metrics.{package} needs {package}", hint=f"pip install {package}")


@contextmanager
def board(settings: MetricsSettings, out: Path, step: int, console: Console) -> Iterator[Write]:
    """Write to all requested targets; numbers after `step` are dropped, as they will be repeated."""
    with ExitStack() as stack:
        writers = [stack.enter_context(_metrics_file(out / FILE, step))]
        if settings.tensorboard:
            writers.append(stack.enter_context(_tensorboard(out / "tensorboard", step)))
        if settings.wandb is not None:
            writers.append(stack.enter_context(_weights_and_biases(settings.wandb, out)))
        writers.append(stack.enter_context(_table(console) if console.is_terminal else _lines(console)))

        def write(step: int, numbers: Mapping[str, float]) -> None:
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
            for writer in writers:
                writer(step, finite)

        yield write


@contextmanager
def _metrics_file(path: Path, step: int) -> Iterator[Write]:
    """Write one object per step, once per step even if a run was killed and resumed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that starts over reports the numbers before its first step again.
    lines = path.read_text().splitlines() if step and path.is_file() else []
    path.write_text("".join(line + "\n" for line in lines if _step(line) <= step))
    with path.open("a", buffering=1) as file:
        yield lambda step, numbers: print(json.dumps({"step": step, **numbers}), file=file)


def _step(line: str) -> float:
    """The step of a line; an incomplete line is of none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


@contextmanager
def _tensorboard(directory: Path, step: int) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    with closing(SummaryWriter(str(directory), purge_step=step + 1)) as writer:
        yield write


@contextmanager
def _weights_and_biases(project: str, out: Path) -> Iterator[Write]:
    # Kept with the run, so that one that goes on is one run there too.
    kept = out / "wandb.id"
    if not kept.exists():
        kept.write_text(secrets.token_hex(8))
    wandb: Any = import_module("wandb")
    run = wandb.init(project=project, name=out.name, id=kept.read_text(), dir=str(out), resume="allow")
    try:
        yield lambda step, numbers: run.log(dict(numbers), step=step)
    finally:
        run.finish()


@contextmanager
def _lines(console: Console) -> Iterator[Write]:
    def write(step: int, numbers: Mapping[str, float]) -> None:
        shown = " ".join(f"{name}={numbers[name]:.4g}" for name in COLUMNS if name in numbers)
        console.print(f"step {step}: {shown}", markup=False)

    yield write


@contextmanager
def _table(console: Console) -> Iterator[Write]:
    """The last steps, live."""
    from rich.live import Live
    from rich.table import Table

    rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=LINES)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        rows.append((step, numbers))
        names = [name for name in COLUMNS if any(name in numbers for _, numbers in rows)]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("step", *names):
            table.add_column(name.replace("_", " "), justify="right")
        for step, numbers in rows:
            table.add_row(str(step), *(f"{numbers[name]:.4g}" if name in numbers else "-" for name in names))
        live.update(table, refresh=True)

    with Live(console=console, auto_refresh=False) as live:
        yield write


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuUsage:
    """The fraction of time in which the GPU computes, for any process, as its driver reports.

    Unknown without a GPU, or if the driver does not report it.
    """

    def __init__(self, device: torch.device) -> None:
        self._samples: list[float] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        opened = _open(device)
        if opened is not None:
            self._thread = threading.Thread(target=self._watch, args=opened, name="polar-gpu", daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self) -> None:
        self._samples = []

    def share(self) -> float | None:
        """The fraction since `begin`, from 0 to 1; None if unknown."""
        return fmean(self._samples) if self._samples else None

    def _watch(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        found = _Utilization()
        while not self._ending.wait(SAMPLE_SECONDS):
            if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) == 0:
                self._samples.append(found.gpu / 100)


def _open(device: torch.device) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The driver's library and its handle of this device, found by its global id."""
    if device.type != "cuda":
        return None
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return None
    handle = ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None
    return library, handle
