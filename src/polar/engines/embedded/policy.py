"""Weights from files, ready to replace those of a running model: whole and checked, or refused.

Files are mapped, not read: one that a trainer wrote to shared memory (a path below /dev/shm) is
copied once, into the model itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from polar.errors import InvalidInput

ADAPTER = "adapter_config.json"
_ADAPTER_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights and the version that tokens sampled with them carry."""

    version: int
    tensors: Mapping[str, torch.Tensor]


def read_policy(version: int, path: Path | None, base: Path, weights: Mapping[str, torch.Tensor]) -> Policy:
    """The weights at a path for a model that has `weights` now; InvalidInput if they are not its own.

    `path` is a directory with safetensors, one such file, or the directory of a LoRA adapter to the weights
    in `base`; None: those themselves.
    """
    source = base if path is None else path
    try:
        is_adapter = (source / ADAPTER).is_file()
        tensors = _merged(_tensors(base), source) if is_adapter else _tensors(source)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"the weights at {source} cannot be read: {error}") from None
    _check(tensors, weights, source)
    return Policy(version, tensors)


def _tensors(source: Path) -> dict[str, torch.Tensor]:
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files:
        raise ValueError("the directory holds no safetensors")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def _merged(tensors: dict[str, torch.Tensor], adapter: Path) -> dict[str, torch.Tensor]:
    """The weights with a LoRA adapter added, as `peft` saves one."""
    config: dict[str, Any] = json.loads((adapter / ADAPTER).read_text())
    unknown = [name for name in ("use_dora", "rank_pattern", "alpha_pattern") if config.get(name)]
    if config.get("peft_type") != "LORA" or unknown or config.get("bias", "none") != "none":
        raise ValueError(f"only plain LoRA adapters can be merged{': not ' + unknown[0] if unknown else ''}")
    rank = int(config["r"])
    scale = float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)
    added = _tensors(adapter)
    downs = {name: tensor for name, tensor in added.items() if name.endswith(_DOWN)}
    if len(added) != 2 * len(downs):
        raise ValueError("the adapter holds more than pairs of lora_A and lora_B")
    for name, down in downs.items():
        target = name.removeprefix(_ADAPTER_PREFIX).removesuffix(_DOWN) + ".weight"
        up, weight = added[name.removesuffix(_DOWN) + _UP], tensors[target]
        tensors[target] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
    return tensors


def _check(tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], source: Path) -> None:
    unknown = tensors.keys() - weights.keys()
    if unknown:
        raise InvalidInput(f"the weights at {source} are of another model: it has no {_some(unknown)}")
    given = {weights[name].data_ptr() for name in tensors}
    missing = {name for name, weight in weights.items() if weight.data_ptr() not in given}
    if missing:
        raise InvalidInput(f"the weights at {source} are not whole: {_some(missing)} is missing")
    for name, tensor in tensors.items():
        if tensor.shape != weights[name].shape:
            shapes = f"{list(tensor.shape)} instead of {list(weights[name].shape)}"
            raise InvalidInput(f"the weights at {source} are of another model: {name} is {shapes}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InvalidInput(f"the weights at {source} hold infinities or NaN: {name}")


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
