"""Transfers a trainer's weights to engines directly, before they are in files.

The manifest says how, in the terms of vLLM's weight transfer. Two locks prevent reads of freed weights, and
end with their processes: the trainer holds one as long as it holds the weights, and readers hold one on the
manifest, which are waited for when it is withdrawn.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import mmap
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import orjson

from polar.engines.base import EngineError
from polar.files import is_locked, lock, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

MANIFEST = "transfer.json"
_HELD = "transfer.lock"
FILES_SECONDS = 600.0
"""Timeout for the files."""
LOOK_SECONDS = 0.1
_COUNTERS = Path("/dev/shm")
_COUNTERS_BEGIN = 64
"""Offset of the counters, of eight bytes each, in a file of torch's."""


class Shared(Protocol):
    """Tensors that engines can take until they are withdrawn."""

    tensors: dict[str, Tensor]
    """Tensors by their names in checkpoints."""
    files_at_once: bool
    """Whether files are written while engines take these: those that cannot wait for files."""

    def withdraw(self) -> None:
        """Free the tensors once no engine reads them."""


Share = Callable[[Mapping[str, "Tensor"], Path], Shared]
"""Holds tensors ready for engines that are told of a directory."""


def tensor_manifest(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Names, types and shapes, as every weight transfer of vLLM takes them."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def publish(manifest: Mapping[str, Any], directory: Path) -> IO[str]:
    """Write the manifest; the weights are valid until the returned file is closed."""
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
    """The manifest in a directory of weights, which stay while the body runs; None: they are files, all of
    which are there."""
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
        _refuse_if_gone(path.parent)
        try:
            found: dict[str, Any] = orjson.loads(file.read())
        except ValueError as error:
            raise EngineError(f"the weights at {path} cannot be read: {error}") from None
        yield found


async def in_files(directory: str | Path | None) -> None:
    """Return once the weights are in files."""
    try:
        async with asyncio.timeout(FILES_SECONDS):
            while directory is not None and Path(directory, MANIFEST).exists():
                _refuse_if_gone(Path(directory))
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise EngineError(
            f"the weights in {directory} were not written to files within {FILES_SECONDS:g} s"
        ) from None


def _refuse_if_gone(directory: Path) -> None:
    # In this order: before the lock is released the manifest is removed, unless the process was killed.
    if not is_locked(directory / _HELD) and (directory / MANIFEST).exists():
        raise EngineError(
            f"the weights in {directory} were in the GPU memory of a process that has ended",
            hint="push them again, or `polar policy update` returns to the first ones",
        )


class SharedTensors:
    """Tensors that engines on the same GPU read over CUDA IPC: none of them leaves the GPU."""

    files_at_once = False

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
        pickled = base64.b64encode(pickle.dumps([{gpu: handle} for handle in handles])).decode()
        update = tensor_manifest(tensors) | {"ipc_handles_pickled": pickled}
        try:
            self._held = publish({"update_info": update}, directory)
        except BaseException:
            self._readers.forget()
            raise

    def withdraw(self) -> None:
        """Free the memory once no engine reads it."""
        import torch

        withdraw(self._directory)
        self._held.close()
        self._readers.forget()
        self.tensors.clear()
        torch.cuda.ipc_collect()


class _Readers:
    """Torch's reader counters of tensors: each begins at 1, and its memory is freed at 0.

    A tensor without a reader, or whose reader dies, stays above 0, and one read twice goes below: either way
    its memory would stay until this process ends, with a warning from torch.
    """

    def __init__(self, places: Sequence[tuple[bytes, int]]) -> None:
        """`places`: the files of counters, and which of each file's."""
        self._places = list(places)
        values = [self._value(*place) for place in self._places]
        if values != [1] * len(values):
            log.warning("this torch counts readers in another way: memory that was shared may stay taken")
            self._places = []

    def forget(self) -> None:
        """Free the memory with its tensors, even if not all readers have finished."""
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
