"""Checkpoints: everything a run needs to resume exactly, written atomically."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from polar.errors import PolarError
from polar.files import atomic_directory

WEIGHTS = "weights"
"""Directory in a checkpoint that `from_pretrained` reads, with weights or adapter."""
STATE = "state.pt"
RANKS = "ranks"
"""Directory in a checkpoint with what each rank has written; any number of ranks resumes from it."""
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run after a step."""

    path: Path
    step: int

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    def state(self) -> dict[str, Any]:
        """Load the state given to `write`. Only tensors and plain values are read, so that no file can run
        code."""
        return self._load(self.path / STATE)

    def parts(self) -> list[dict[str, Any]]:
        """What each rank has written, in the order of ranks. Tensors are read when they are used."""
        found = [self._load(path) for path in sorted((self.path / RANKS).glob("*.pt"))]
        if not found:
            raise PolarError(
                f"{self.path}: the checkpoint has no optimizer, as of an earlier version",
                hint="begin another run with its weights as model.start",
            )
        return found

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise PolarError(
                f"{self.path}: the checkpoint cannot be read: {error}",
                hint="delete it to go on from the one before",
            ) from None
        return state


def latest(directory: Path) -> Checkpoint | None:
    found = checkpoints(directory)
    return found[-1] if found else None


def checkpoints(directory: Path) -> list[Checkpoint]:
    """The complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    named = ((path, _NAME.fullmatch(path.name)) for path in directory.iterdir())
    found = [Checkpoint(path, int(match[1])) for path, match in named if match]
    return sorted(found, key=lambda one: one.step)


def write(
    directory: Path, step: int, save: Callable[[Path], None], state: dict[str, Any], keep: int
) -> Checkpoint:
    """Write a checkpoint under a temporary name, give it its own, and remove all but the last ones."""
    made = Checkpoint(directory / f"step-{step:06d}", step)
    with atomic_directory(made.path, durable=True) as part:
        save(part)
        torch.save(state, part / STATE)
        shutil.rmtree(made.path, ignore_errors=True)
    for old in checkpoints(directory)[:-keep]:
        shutil.rmtree(old.path)
    return made


def write_part(directory: Path, rank: int, state: dict[str, Any]) -> None:
    """Write what one rank has of a checkpoint."""
    directory.mkdir(exist_ok=True)
    torch.save(state, directory / f"{rank:05d}.pt")


def random_state() -> dict[str, Any]:
    """The state of every generator that a step may draw from, in tensors and plain values."""
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
    }


def restore_random(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    # Of the GPU that this process computes on: there may be fewer others than where it was written.
    for own in state["cuda"][:1]:
        torch.cuda.set_rng_state(own)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


FILE_BYTES = 5 * 10**9
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_weights(tensors: Mapping[str, Tensor], directory: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write one file of safetensors, or several up to this size with an index, named as in checkpoints.

    From a GPU they come through one pinned buffer.
    """
    parts = list(_parts(tensors, file_bytes))
    if len(parts) == 1:
        _write(tensors, directory / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _write(part, directory / name)
        places |= dict.fromkeys(part, name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _parts(tensors: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > most:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    on_gpu = [tensor.nbytes for tensor in tensors.values() if tensor.is_cuda]
    buffer = torch.empty(max(on_gpu, default=0), dtype=torch.uint8, pin_memory=bool(on_gpu))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)
            if data.is_cuda:
                data = buffer[: data.numel()].copy_(data)
            file.write(memoryview(data.numpy()))
