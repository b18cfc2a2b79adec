"""Linear attention along the tree of a batch: states begin at its roots and fork where it does.

No mask keeps traces apart in a layer that carries a state from token to token. transformers writes Gated
DeltaNet as projections and norms, which see one token at a time, and two functions called by name, which see
those before it: a causal convolution and the gated delta rule. These two are replaced, and nothing else.

    root ─┬─ a ─┬─ c        level 0: root       begins with nothing
          │     └─ d        level 1: a, b       begin with the root's last state
          └─ b              level 2: c, d       begin with a's last state

Every stretch is computed once, all stretches of a level together. Autograd adds up the gradients of all that
begins with one state.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polar.training.head import to_device
from polar.trajectory.packing.batch import Batch, Indices, Stretches, stretches, windows

LINEAR = "linear_attention"
"""The layer's type in configurations of models."""
CHUNK = 64
"""Tokens that the gated delta rule takes at once."""
NEAR = 0.1
"""Relative distance that rounding never makes of one layer's output."""
_CONVOLUTION, _RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels compute the rule, which know bfloat16 alone; plain functions know every precision."""
    return device.type == "cuda" and dtype is torch.bfloat16 and find_spec("fla") is not None


def gated_delta_nets(model: nn.Module) -> list[Any]:
    """Find the modules that call both functions by name."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "conv1d", None), nn.Conv1d)
        and {_CONVOLUTION, _RULE} <= _called_by_name(_written_forward(module))
    ]


def _called_by_name(function: FunctionType) -> set[str]:
    return {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}


def _written_forward(module: nn.Module) -> FunctionType:
    """The forward function of the module's class, without decorators."""
    forward: FunctionType = inspect.unwrap(type(module).forward)
    return forward


class StateTree:
    """Computes every Gated DeltaNet of these models along the tree of the current batch."""

    def __init__(self, models: Iterable[nn.Module], device: torch.device, *, has_kernels: bool) -> None:
        layers = [layer for model in models for layer in gated_delta_nets(model)]
        self._device = device
        self._layers = layers
        self._width = layers[0].conv1d.kernel_size[0]
        self._has_kernels = has_kernels
        self._layout: _Layout | None = None
        for layer in layers:
            layer.forward = torch.compiler.disable(self._replace_functions(layer))

    def follow(self, batch: Batch) -> None:
        """Compute along this batch from now on, also when activations are computed again."""
        self._layout = _lay_out(batch, self._width, self._device, has_kernels=self._has_kernels)

    def keeps_apart(self, batch: Batch, size: int) -> bool:
        """Whether the layers compute the same for both halves of a batch, which are traces of one length.

        A layer may see other tokens in a way that is not known here; nothing else would tell.
        """
        self.follow(batch)
        half = torch.randn(1, len(batch) // 2, size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for layer in self._layers:
                like = next(layer.parameters())
                first, second = layer(torch.cat([half, half], 1).to(like))[0].chunk(2)
                if ((first - second).norm(dim=-1) > NEAR * first.norm(dim=-1)).any():
                    return False
        self._layout = None
        return True

    def _replace_functions(self, layer: nn.Module) -> MethodType:
        """The layer's forward function with the two names standing for what is below."""
        written = _written_forward(layer)
        names = written.__globals__ | {
            _CONVOLUTION: partial(self._convolve, written.__globals__[_CONVOLUTION]),
            _RULE: partial(self._apply_rule, written.__globals__[_RULE]),
        }
        forward = FunctionType(
            written.__code__, names, written.__name__, written.__defaults__, written.__closure__
        )
        forward.__kwdefaults__ = written.__kwdefaults__
        return MethodType(forward, layer)

    def _convolve(self, convolve: Callable[..., Tensor], inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Convolve [1, channels, tokens] as they lie, and tokens apart that do not follow the one beside."""
        layout = self._layout
        if layout is None:
            return convolve(inputs, *args, **kwargs)
        plain = inspect.unwrap(convolve)
        whole = (convolve if self._has_kernels else plain)(inputs, *args, **kwargs)
        taken = F.pad(inputs[0], (0, 1)).index_select(1, layout.windows.flatten())
        apart = plain(taken.unflatten(1, layout.windows.shape).movedim(0, 1), *args, **kwargs)
        return whole.index_copy(2, layout.moved, apart[..., -1].T[None])

    def _apply_rule(
        self, rule: Callable[..., Any], *inputs: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layout = self._layout
        if layout is None:
            made: tuple[Tensor, None] = rule(*inputs, g=g, beta=beta, **kwargs)
            return made
        apply = rule if self._has_kernels else inspect.unwrap(rule)
        # A token of zeros leaves a state as it is: what shorter stretches are filled up with.
        given = (_with_zeros(tensor[0]).index_select(0, layout.order) for tensor in (*inputs, g, beta))
        parts = zip(*(tensor.split(layout.sizes) for tensor in given), strict=True)
        outputs = []
        states: Tensor | None = None
        for number, level in enumerate(layout.levels, 1):
            is_followed, ends = number < len(layout.levels), []
            for call in level:
                *taken, decay, weight = (tensor.unflatten(0, call.shape) for tensor in next(parts))
                begun = None if states is None else states.index_select(0, call.parents)
                asked = call.options | {"initial_state": begun, "output_final_state": is_followed}
                output, end = apply(*taken, g=decay, beta=weight, **kwargs | asked)
                outputs.append(output.flatten(0, 1))
                ends.append(end)
            states = torch.cat(ends) if is_followed else None
        return _with_zeros(torch.cat(outputs)).index_select(0, layout.places)[None], None


def _with_zeros(tensor: Tensor) -> Tensor:
    """The rows, and one of zeros after them."""
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Stretches to which the rule is applied at once."""

    shape: tuple[int, int]
    """Number of sequences, and of tokens in each."""
    parents: Tensor
    """For each stretch, the index of its parent among those of the level before."""
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """A batch as layers of linear attention compute it."""

    levels: tuple[tuple[_Call, ...], ...]
    """What follows from nothing, what follows from that, and so on."""
    order: Tensor
    """The tokens of all calls; the one after the batch's last is zero."""
    sizes: list[int]
    """Number of tokens of each call."""
    places: Tensor
    """For each token, its place in that order; padding has the one after its last."""
    moved: Tensor
    """Tokens whose row is not what lies beside them, as far as the convolution sees."""
    windows: Tensor
    """[moved, width]: what it shall see of each of them."""


Arranged = Iterator[tuple[Indices, Indices, dict[str, Any]]]
"""For each call: stretches, the positions of their tokens, and options of the rule."""


def _lay_out(batch: Batch, width: int, device: torch.device, *, has_kernels: bool) -> _Layout:
    put = partial(to_device, device=device)
    arrange = partial(_joined, device=device) if has_kernels else _filled_up
    found, size = stretches(batch), len(batch)
    indices = np.zeros(len(found.starts), np.int64)
    levels: list[tuple[_Call, ...]] = []
    order: list[Indices] = []
    for level in range(int(found.levels.max()) + 1):
        calls, members = [], []
        for group, tokens, options in arrange(found, np.flatnonzero(found.levels == level), size):
            calls.append(_Call(tokens.shape, put(indices[found.parents[group]]), options))
            members.append(group)
            order.append(tokens.ravel())
        levels.append(tuple(calls))
        indices[np.concatenate(members)] = np.arange(sum(map(len, members)))
    flat = np.concatenate(order)
    places = np.full(size + 1, len(flat))
    places[flat] = np.arange(len(flat))
    moved, seen = windows(batch, width)
    return _Layout(
        levels=tuple(levels),
        order=put(flat),
        sizes=[len(tokens) for tokens in order],
        places=put(places[:size]),
        moved=put(moved),
        windows=put(np.where(seen < 0, size, seen)),
    )


def _filled_up(found: Stretches, members: Indices, size: int) -> Arranged:
    """Stretches of about one length side by side, none filled up to more than twice its chunks."""
    sizes = np.ceil(np.log2(-(-found.lengths[members] // CHUNK)))
    for chunks in np.unique(sizes):
        group = members[sizes == chunks]
        lengths = found.lengths[group, None]
        index = np.arange(lengths.max())
        tokens = np.where(index < lengths, found.starts[group, None] + index, size)
        yield group, tokens, {"chunk_size": min(CHUNK, len(index))}


def _joined(found: Stretches, members: Indices, size: int, *, device: torch.device) -> Arranged:
    """All stretches one after the other, as kernels for sequences of any length take them."""
    ends = np.cumsum(found.lengths[members])
    begins = ends - found.lengths[members]
    tokens = np.arange(ends[-1]) + np.repeat(found.starts[members] - begins, found.lengths[members])
    bounds = np.append(begins, ends[-1])
    # Kernels that know of the second wait for no copy of the first.
    options = {"cu_seqlens": to_device(bounds, device), "cu_seqlens_cpu": torch.from_numpy(bounds)}
    yield members, tokens[None], options
