"""A run's numbers: a table in the terminal, metrics.jsonl, its server's dashboard, trackers; GPU usage."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Protocol, Self

import torch

from polar.client import Client
from polar.errors import InvalidInput, PolarError
from polar.models.task import Run
from polar.models.views import LONGEST_NUMBER_NAME, MOST_NUMBERS, RunStep
from polar.training.settings import MetricsSettings
from polar.training.trackers import Track, trackers
from polar.trajectory.learnable import Group

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

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
STEPS_UNREPORTED = 1000
"""Maximum steps that are kept for a server that cannot be reached."""
SAMPLE_SECONDS = 0.1
"""The driver averages over the last sixth of a second to a second, depending on the GPU."""


class Write(Protocol):
    """Takes a step, its numbers, and the groups that it learned from."""

    def __call__(self, step: int, numbers: Mapping[str, float], groups: Sequence[Group] = (), /) -> None: ...


@dataclass(frozen=True, slots=True)
class RunOnServer:
    """A run that a server's dashboard shows."""

    client: Client
    run: Run
    token: str | None = None
    """Opens the dashboard to readers, where there is one to be shown."""

    def link(self, *, is_shown: bool) -> str:
        """The address of its page; a token is for terminals only, since output in a file stays there."""
        page = f"{self.client.server}/runs/{self.run.name}"
        return f"{page}#token={self.token}" if self.token and is_shown else page


@contextmanager
def board(
    settings: MetricsSettings, out: Path, step: int, console: Console, server: RunOnServer | None = None
) -> Iterator[Write]:
    """Write to all requested targets; numbers after `step` are dropped, as they will be repeated."""
    with ExitStack() as stack:
        writers = [stack.enter_context(_metrics_file(out / FILE, step))]
        writers += [stack.enter_context(tracker) for tracker in trackers(settings, out, step)]
        if server is not None:
            writers.append(_on_server(server, step, console))
        writers.append(stack.enter_context(_table(console) if console.is_terminal else _lines(console)))

        def write(step: int, numbers: Mapping[str, float], groups: Sequence[Group] = (), /) -> None:
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
            for writer in writers:
                writer(step, finite, groups)

        yield write


def _on_server(server: RunOnServer, step: int, console: Console) -> Track:
    """Report each step to the server; what it could not be told is told with the next one.

    It takes a limited number of metrics for each step: those of single families are the first to be left out.
    """
    unreported: deque[RunStep] = deque(maxlen=STEPS_UNREPORTED)
    server.client.begin_run(server.run, step)
    console.print(f"• dashboard: {server.link(is_shown=console.is_terminal)}", markup=False, soft_wrap=True)

    def write(step: int, numbers: Mapping[str, float], groups: Sequence[Group]) -> None:
        names = sorted((name for name in numbers if len(name) <= LONGEST_NUMBER_NAME), key=_is_of_a_part)
        told = {name: numbers[name] for name in names[:MOST_NUMBERS]}
        learned = tuple(group.task_id for group in groups)
        unreported.append(RunStep(step=step, numbers=told, tasks=learned))
        while unreported:
            try:
                server.client.report_steps(server.run.name, [unreported[0]])
            except PolarError as error:
                log.warning("step %d is not on the dashboard: %s", unreported[0].step, error)
                if not isinstance(error, InvalidInput):
                    return
            unreported.popleft()

    return write


def _is_of_a_part(name: str) -> bool:
    return "/" in name


@contextmanager
def _metrics_file(path: Path, step: int) -> Iterator[Track]:
    """Write one object per step, once per step even if a run was killed and resumed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that starts over reports the numbers before its first step again.
    lines = path.read_text().splitlines() if step and path.is_file() else []
    path.write_text("".join(line + "\n" for line in lines if _step(line) <= step))
    with path.open("a", buffering=1) as file:
        yield lambda step, numbers, _: print(json.dumps({"step": step, **numbers}), file=file)


def _step(line: str) -> float:
    """The step of a line; an incomplete line is of none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


@contextmanager
def _lines(console: Console) -> Iterator[Track]:
    def write(step: int, numbers: Mapping[str, float], _: Sequence[Group]) -> None:
        shown = " ".join(f"{name}={numbers[name]:.4g}" for name in COLUMNS if name in numbers)
        console.print(f"step {step}: {shown}", markup=False)

    yield write


@contextmanager
def _table(console: Console) -> Iterator[Track]:
    """The last steps, live."""
    from rich.live import Live
    from rich.table import Table

    rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=LINES)

    def write(step: int, numbers: Mapping[str, float], _: Sequence[Group]) -> None:
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
