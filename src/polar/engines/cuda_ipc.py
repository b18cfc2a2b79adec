"""Weights that engines read from a trainer's GPU memory, over CUDA IPC: none of them leaves the GPU.

The manifest is what vLLM's weight transfer is asked with. It names memory of a process on the same GPU. Two
locks, which end with whoever holds them, keep anybody from reading memory that is not there: that process has
one as long as it holds the memory; readers have one on the manifest, and are waited for when it is withdrawn.
"""

from __future__ import annotations

import base64
import logging
import mmap
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson

from polar.engines.base import EngineError
from polar.files import is_locked, lock, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

MANIFEST = "cuda-ipc.json"
_HELD = "cuda-ipc.lock"
_COUNTERS = Path("/dev/shm")
_COUNTERS_BEGIN = 64
"""Where in a file of torch's its counters begin, of eight bytes each."""


class SharedTensors:
    """Tensors on one GPU, under the names that checkpoints give them, for engines to read until withdrawn."""

    def __init__(self, tensors: Mapping[str, Tensor], directory: Path) -> None:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        self.tensors = dict(tensors)
        self._directory = directory
        first = next(iter(tensors.values()))
        gpu = str(torch.cuda.get_device_properties(first.device).uuid)
        handles = [reduce_tensor(tensor)[1] for tensor in tensors.values()]
        torch.cuda.synchronize(first.device)
        self._readers = _Readers([(handle[11], handle[12]) for handle in handles])
        manifest = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "ipc_handles_pickled": base64.b64encode(
                pickle.dumps([{gpu: handle} for handle in handles])
            ).decode(),
        }
        try:
            self._held = publish(manifest, directory)
        except BaseException:
            self._readers.forget()
            raise

    def withdraw(self) -> None:
        """Let go of the memory, as soon as no engine reads it."""
        import torch

        withdraw(self._directory)
        self._held.close()
        self._readers.forget()
        self.tensors.clear()
        torch.cuda.ipc_collect()


class _Readers:
    """Torch's counters of who has yet to read a tensor: each begins at 1, and its memory is freed at 0.

    One that nobody reads, or whose reader dies, stays there, one that two read goes below: either way the
    memory would not be freed before this process ends, which torch then warns of.
    """

    def __init__(self, places: Sequence[tuple[bytes, int]]) -> None:
        """`places`: the files of counters, and which of each file's."""
        self._places = list(places)
        values = [self._value(*place) for place in self._places]
        if values != [1] * len(values):
            log.warning("this torch counts readers in another way: memory that was shared may stay taken")
            self._places = []

    def forget(self) -> None:
        """Have the memory freed with its tensors, whoever has read them."""
        for place in self._places:
            self._value(*place, becomes=0)
        self._places = []

    def _value(self, file: bytes, number: int, *, becomes: int | None = None) -> int | None:
        at = _COUNTERS_BEGIN + 8 * number
        try:
            with (
                (_COUNTERS / file.decode().lstrip("/")).open("r+b") as opened,
                mmap.mmap(opened.fileno(), 0) as memory,
            ):
                if becomes is not None:
                    memory[at : at + 8] = becomes.to_bytes(8, "little", signed=True)
                return int.from_bytes(memory[at : at + 8], "little", signed=True)
        except (OSError, ValueError):
            return None


def publish(manifest: Mapping[str, Any], directory: Path) -> IO[str]:
    """Tell engines of memory, which is taken to be there until what is returned is closed."""
    held = (directory / _HELD).open("w")
    lock(held)
    write_atomic(directory / MANIFEST, orjson.dumps(manifest).decode())
    return held


def withdraw(directory: Path) -> None:
    """Remove the manifest, if there is one; return when no engine reads what it named."""
    try:
        manifest = (directory / MANIFEST).open("rb")
    except FileNotFoundError:
        return
    with manifest:
        (directory / MANIFEST).unlink(missing_ok=True)
        lock(manifest)


@contextmanager
def reading(directory: str | Path | None) -> Iterator[dict[str, Any] | None]:
    """The manifest in a directory of weights, whose memory stays while the body runs; None: they are files,
    all of which are there."""
    path = Path(directory or "", MANIFEST)
    try:
        file = path.open("rb") if directory is not None else None
    except (FileNotFoundError, NotADirectoryError):
        file = None
    if file is None:
        yield None
        return
    with file:
        lock(file, is_shared=True)
        if not path.exists():
            # It was withdrawn meanwhile.
            yield None
            return
        if not is_locked(path.with_name(_HELD)):
            raise EngineError(
                f"the weights in {path.parent} were in the GPU memory of a process that has ended",
                hint="push them again, or `polar policy update` returns to the first ones",
            )
        try:
            found: dict[str, Any] = orjson.loads(file.read())
        except ValueError as error:
            raise EngineError(f"the weights at {path} cannot be read: {error}") from None
        yield found
