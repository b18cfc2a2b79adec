"""A run's numbers: a table in the terminal, metrics.jsonl, TensorBoard or W&B if asked for; GPU usage."""

from __future__ import annotations

import ctypes
import json
import math
import secrets
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from polar.errors import NotInstalled
from polar.training.settings import MetricsSettings

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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
"""What the terminal shows of the numbers that there are; the file has them all."""
LINES = 20
"""How many steps the terminal shows."""
NVML = "libnvidia-ml.so.1"
SAMPLE_SECONDS = 0.1
"""The driver averages over the last sixth of a second to a second, depending on the GPU."""


class Writer(Protocol):
    """Takes each step's numbers."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Board:
    """All writers of a run."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = list(writers)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        for writer in self._writers:
            writer.write(step, finite)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


def require(settings: MetricsSettings) -> None:
    """Refuse to begin where a package is missing that the numbers are to go to."""
    for package, is_asked in (("tensorboard", settings.tensorboard), ("wandb", settings.wandb is not None)):
        if is_asked and find_spec(package) is None:
            raise NotInstalled(f"metrics.{package} needs {package}", hint=f"pip install {package}")


def board(settings: MetricsSettings, out: Path, step: int, console: Console) -> Board:
    """The writers that are asked for; numbers of steps after `step` are forgotten, for they come again."""
    writers: list[Writer] = [MetricsFile(out / FILE, step)]
    if settings.tensorboard:
        writers.append(TensorBoard(out / "tensorboard", step))
    if settings.wandb is not None:
        writers.append(WeightsAndBiases(settings.wandb, out))
    return Board([*writers, Terminal(console)])


class MetricsFile:
    """One object a step, each step once also where a run was killed and went on."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that begins anew tells how it was before its first step again.
        kept = [line for line in _lines(path) if _step(line) <= step] if step else []
        path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a", buffering=1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")

    def close(self) -> None:
        self._file.close()


class Terminal:
    """A table that grows, or lines where nobody watches."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._rows: list[tuple[int, Mapping[str, float]]] = []
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._live is None:
            shown = " ".join(f"{name}={numbers[name]:.4g}" for name in COLUMNS if name in numbers)
            self._console.print(f"step {step}: {shown}", markup=False)
            return
        self._rows = [*self._rows, (step, numbers)][-LINES:]
        self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _table(self) -> RenderableType:
        from rich.table import Table

        names = [name for name in COLUMNS if any(name in numbers for _, numbers in self._rows)]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("step", *names):
            table.add_column(name.replace("_", " "), justify="right")
        for step, numbers in self._rows:
            table.add_row(str(step), *(f"{numbers[name]:.4g}" if name in numbers else "-" for name in names))
        return table


class TensorBoard:
    def __init__(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), purge_step=step + 1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, out: Path) -> None:
        wandb = import_module("wandb")
        # Kept with the run, so that one that goes on is one run there too.
        kept = out / "wandb.id"
        if not kept.exists():
            kept.write_text(secrets.token_hex(8))
        self._run: Any = wandb.init(
            project=project, name=out.name, id=kept.read_text(), dir=str(out), resume="allow"
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _step(line: str) -> float:
    """Which step a line is of; one that a killed process left half is of none that was reached."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuUsage:
    """The share of time in which the GPU computes anything, for whichever process, as its driver says.

    Unknown on a machine without a GPU, and where the driver does not say.
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
        """Since `begin`, between 0 and 1; None: not known."""
        return fmean(self._samples) if self._samples else None

    def _watch(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        found = _Utilization()
        while not self._ending.wait(SAMPLE_SECONDS):
            if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) == 0:
                self._samples.append(found.gpu / 100)


def _open(device: torch.device) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The driver's library and its handle of this device, found by an id that all processes share."""
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
