"""Weights that engines read from a trainer's GPU memory, over CUDA IPC: none of them leaves the GPU.

The manifest is what vLLM's weight transfer is asked with. It names memory of a process on the same GPU, which
must hold the tensors until the manifest is gone.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from polar.engines.base import EngineError
from polar.files import write_atomic

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "cuda-ipc.json"


def share(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write the manifest of tensors on one GPU, under the names that checkpoints give them."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    first = next(iter(tensors.values()))
    gpu = str(torch.cuda.get_device_properties(first.device).uuid)
    handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in tensors.values()]
    torch.cuda.synchronize(first.device)
    manifest = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }
    write_atomic(directory / MANIFEST, orjson.dumps(manifest).decode())


def shared(directory: str | Path) -> dict[str, Any] | None:
    """The manifest in a directory of weights; None: they are files."""
    path = Path(directory, MANIFEST)
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise EngineError(f"the weights at {path} cannot be read: {error}") from None
    return found
