"""Writes weights to safetensors files, from a GPU through one pinned buffer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

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
    """Write one file, or several up to this size with an index, named as in checkpoints."""
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
