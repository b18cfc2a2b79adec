"""Weights and optimizer state that are spread over ranks, each tensor by its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Part = Mapping[str, Mapping[str, Tensor]]
"""What one rank has of the optimizer's state, by parameter: tensors without dimensions are the same on every
rank, and all others flat, so that those of all ranks make up the whole one after the other."""


def shard(model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> None:
    """Spread a model over all ranks. Rank 0 gives its weights; the others have their shapes alone."""
    gives = dist.get_rank() == 0
    weights = model.state_dict() if gives else {}
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*layers, model):
        sharded: Any = fully_shard(module, mesh=mesh)
        # Losses are parts of a sum: their gradients are added up, where FSDP would average them.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    if not gives:
        model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor; every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def optimizer_part(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Part:
    return {
        name: {key: _flat(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], parts: Sequence[Part]
) -> None:
    """Take this rank's rows from the parts of all ranks, however many there were."""
    state = {
        number: {key: _rows(parameter, [part[name][key] for part in parts]) for key in parts[0][name]}
        for number, (name, parameter) in enumerate(parameters.items())
        if name in parts[0]
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _flat(value: Tensor) -> Tensor:
    return _local(value).flatten() if value.ndim else value


def _rows(parameter: nn.Parameter, parts: Sequence[Tensor]) -> Tensor:
    if not parts[0].ndim:
        return parts[0].clone()
    found = torch.zeros_like(parameter)
    mine = _local(found).view(-1)
    start, at = _start(parameter), 0
    for part in parts:
        begin, end = max(start, at), min(start + len(mine), at + len(part))
        if begin < end:
            mine[begin - start : end - start] = part[begin - at : end - at]
        at += len(part)
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _start(parameter: nn.Parameter) -> int:
    """The number of elements that ranks before this one have of a parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    rows, mesh = parameter.shape[0], parameter.device_mesh
    first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
    return int(first * (parameter.numel() // max(rows, 1)))
