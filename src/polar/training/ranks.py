"""The processes that train one model together: rank 0 leads a run, and the others follow its orders.

They are started by `polar train --processes N` or by `torchrun`. Orders travel without a deadline, since
rank 0 may collect for hours; what ranks compute together has one, so that a rank that hangs ends the run.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Self

import torch
import torch.distributed as dist

from polar.config.settings import set_unless_given
from polar.errors import InvalidInput, PolarError
from polar.training.settings import RunSettings

log = logging.getLogger(__name__)

DEADLINE = timedelta(minutes=10)
"""Maximum time that a rank waits for the others in what they compute together."""
FILES_DEADLINE = timedelta(hours=1)
"""Maximum time that a rank waits for the others to read or write files."""
NO_DEADLINE = timedelta(days=365)
NOTICE_SECONDS = 2.0
"""How long rank 0 may take to notice a lost rank by itself, before it is interrupted."""
STOP_SECONDS = 10.0
LOST = 75
"""The exit code of a rank that ends because it lost the others."""
Pair = tuple[float, float]
"""A sum, and the number of terms in it."""
_FAILURE = "failure"
_RESUME = "the same command resumes after the last checkpoint"


class Collective(Enum):
    """What all ranks do together, when rank 0 orders it."""

    BEGIN = auto()
    """Load the policy, and of the checkpoint that is named the optimizer."""
    LEARN = auto()
    """Make a step's updates, with batches that rank 0 deals."""
    GATHER = auto()
    """Bring the weights to rank 0, in the precision that is named."""
    KEEP = auto()
    """Write each rank's part of a checkpoint to the directory that is named."""
    END = auto()


class Ranks:
    """All ranks, as one of them sees them. A process that trains alone has nobody to order or ask."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: dist.Store | None = None,
        followers: _Followers | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._followers = followers
        self._orders = dist.new_group(backend="gloo", timeout=NO_DEADLINE) if size > 1 else None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def order(self, order: Collective, argument: Any = None) -> None:
        """As rank 0, have the others do what this process does next."""
        if self._orders is not None and self.leads:
            dist.broadcast_object_list([order, argument], 0, group=self._orders)

    def next_order(self) -> tuple[Collective, Any]:
        """As another rank, wait for rank 0, however long it takes."""
        received: list[Any] = [None, None]
        dist.broadcast_object_list(received, 0, group=self._orders)
        return received[0], received[1]

    def wait(self) -> None:
        """Return once every rank has read or written its files."""
        if self._orders is not None:
            dist.monitored_barrier(self._orders, timeout=FILES_DEADLINE)

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's one of the values that rank 0 has."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, list(values) if values is not None else None, 0)
        return mine[0]

    def add_up(self, pairs: dict[str, Pair]) -> dict[str, Pair]:
        """Add pairs of one name over the ranks that have it, to the same bits on every rank."""
        if self._orders is None:
            return pairs
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, pairs)
        names = dict.fromkeys(name for one in found for name in one)
        added = {name: zip(*(one[name] for one in found if name in one), strict=True) for name in names}
        return {name: (sum(totals), sum(counts)) for name, (totals, counts) in added.items()}

    @contextmanager
    def explained(self) -> Iterator[None]:
        """As rank 0, say which rank has ended and why, instead of what follows from it here."""
        try:
            yield
        except (RuntimeError, KeyboardInterrupt) as error:
            is_lost = _is_lost(error)
            if lost := self._lost(seconds=NOTICE_SECONDS if is_lost else 0.0):
                raise PolarError(lost, hint=_RESUME) from error
            if is_lost:
                raise PolarError(f"the ranks lost each other: {_line(error)}", hint=_RESUME) from error
            raise
        finally:
            if self._followers is not None:
                self._followers.noticed.set()

    def _lost(self, seconds: float) -> str | None:
        """Which rank has ended and why, if one has or does within these seconds."""
        if self._store is None:
            return None
        ended = self._followers.next_ended(seconds) if self._followers else None
        if not self._store.check([_FAILURE]):
            return ended
        if self._followers is None:
            # The rank that failed has said so, since torchrun may have ended this one before it could.
            raise SystemExit(1)
        return str(self._store.get(_FAILURE).decode())

    @contextmanager
    def reported(self) -> Iterator[None]:
        """As another rank, tell rank 0 why this one fails, and end the process."""
        try:
            yield
        except Exception as error:
            if _is_lost(error):
                raise SystemExit(LOST) from None
            assert self._store is not None
            log.exception("rank %d failed", self.rank)
            kind = "" if isinstance(error, PolarError) else f"{type(error).__name__}: "
            reason = f"rank {self.rank} of {self.size} failed: {kind}{_line(error)}"
            self._store.set(_FAILURE, reason)
            if dist.is_torchelastic_launched():
                print(f"error: {reason} ({_RESUME})", file=sys.stderr)
            raise SystemExit(1) from error


def are_several(processes: int) -> bool:
    """Whether a run has, or may have, more than one process."""
    return processes > 1 or bool(dist.is_torchelastic_launched())


@contextmanager
def joined(settings: RunSettings, processes: int) -> Iterator[Ranks]:
    """The ranks of a run: those that torchrun has started, or this process and others that it starts."""
    if dist.is_torchelastic_launched():
        if processes > 1:
            raise InvalidInput("--processes: torchrun has started the processes of this run already")
        store, rank, size = next(iter(dist.rendezvous("env://")))
        if rank:
            # Rank 0 decides what an interrupt means, and the others end with it.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with _group(settings, store, rank, size) as ranks:
            yield ranks
    elif processes == 1:
        yield Ranks()
    else:
        if _has_gpus(settings):
            _require_gpus(processes)
        _stay_on_this_machine()
        with tempfile.TemporaryDirectory(prefix="polar-ranks-") as directory:
            file = Path(directory) / "store"
            with _Followers(settings, file, processes) as followers:
                store = dist.FileStore(str(file), processes)
                followers.wait_for(store)
                with _group(settings, store, 0, processes, followers) as ranks:
                    yield ranks


@contextmanager
def summoned() -> Iterator[tuple[RunSettings, Ranks]]:
    """As a process that `joined` has started, join the ranks that standard input tells of."""
    settings, file, rank, size = pickle.load(sys.stdin.buffer)
    Thread(target=_end_with_rank_0, name="rank-0", daemon=True).start()
    _stay_on_this_machine()
    store = dist.FileStore(str(file), size)
    store.set(_here(rank), "")
    with _group(settings, store, rank, size) as ranks:
        yield settings, ranks


@contextmanager
def _group(
    settings: RunSettings, store: dist.Store, rank: int, size: int, followers: _Followers | None = None
) -> Iterator[Ranks]:
    backend = "gloo"
    if not _has_gpus(settings):
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    else:
        here = dist.get_node_local_rank(fallback_rank=rank)
        _require_gpus(here + 1)
        torch.cuda.set_device(here)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=DEADLINE)
    ranks = Ranks(rank, size, store, followers)
    yield ranks
    # One that has ended already has nothing left to do.
    with suppress(RuntimeError):
        ranks.order(Collective.END)
        dist.destroy_process_group()


def _has_gpus(settings: RunSettings) -> bool:
    return settings.model.device != "cpu" and bool(torch.cuda.is_available())


def _require_gpus(count: int) -> None:
    if count > (found := torch.cuda.device_count()):
        raise InvalidInput(
            f"{count} processes on this machine need as many GPUs, and torch sees {found}",
            hint="start as many processes as there are GPUs, or set model.device to cpu",
        )


def _stay_on_this_machine() -> None:
    """Keep ranks that share a machine from listening where others can connect."""
    set_unless_given("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def _end_with_rank_0() -> None:
    # Not through `sys.stdin`: a thread that waits in it would be in the way of an orderly exit.
    os.read(sys.stdin.fileno(), 1)
    os._exit(LOST)


def _here(rank: int) -> str:
    return f"rank {rank} is here"


def _is_lost(error: BaseException) -> bool:
    """Whether other ranks have ended, or do not answer; what gloo raises then has no type of its own."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _line(error: BaseException) -> str:
    """The first line of an error, without the place in torch's own sources."""
    line = (str(error) or repr(error)).splitlines()[0]
    return re.sub(r"^\[/\S+:\d+\] ", "", line)


class _Followers:
    """The other ranks of a run, as processes that this one has started."""

    def __init__(self, settings: RunSettings, store: Path, size: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: SimpleQueue[str] = SimpleQueue()
        self._calls = [(settings, store, rank, size) for rank in range(1, size)]
        self.noticed = Event()
        """Whether this process knows that something has ended."""

    def __enter__(self) -> Self:
        for call in self._calls:
            command = [sys.executable, "-P", "-m", "polar.training.run"]
            # In a session of its own: an interrupt typed at rank 0 is rank 0's to answer.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(call))
            process.stdin.flush()
            name = f"rank {len(self._processes)} of {len(self._calls) + 1}"
            Thread(target=self._watch, args=(name, process), name=name, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.noticed.set()
        for process in self._processes:
            if kind is not None:
                process.terminate()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def wait_for(self, store: dist.Store) -> None:
        """Return once all have come; raise if one has ended instead."""
        names = [_here(rank) for rank in range(1, len(self._processes) + 1)]
        while not store.check(names):
            if ended := self.next_ended(seconds=0.05):
                raise PolarError(ended)

    def next_ended(self, seconds: float) -> str | None:
        """Which one has ended and how, if one has or does within these seconds."""
        with suppress(Empty):
            return self._ended.get(timeout=seconds)
        return None

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code != LOST:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._ended.put(f"{name} {how}")
        if not self.noticed.wait(NOTICE_SECONDS):
            # A real signal, which ends a wait, too; `interrupt_main` would be seen after it.
            os.kill(os.getpid(), signal.SIGINT)
