"""How likely a model's last layer holds some tokens, and the gradient of it.

Logits are made a chunk of tokens at a time, and again in the backward pass: tokens × vocabulary is never
there at once. Computing in bfloat16 rounds what is multiplied, never what is summed.

The backward pass sums over the vocabulary. Nearly all of it is nearly impossible: added one token after
the other to a sum that already holds the likely ones, it is lost in the rounding, and always the same part
of the gradient is, as embeddings have a direction in common. So the vocabulary is summed in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from polar.engines.embedded.model import product

PART = 2048
"""Tokens of the vocabulary that are summed one after the other."""


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy the array to the device without blocking.

    A copy from ordinary memory blocks until the GPU has finished its queue; one from pinned memory joins the
    queue, and kernels follow without a gap.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class Manner:
    """How logits are made."""

    dtype: torch.dtype
    """Type of the factors."""
    chunk: int
    """Number of tokens whose logits exist at once."""
    temperature: float = 1.0


def score(hidden: Tensor, weight: Tensor, labels: Tensor, manner: Manner) -> tuple[Tensor, Tensor]:
    """Return the logprob of each row's label, and the entropy of its distribution."""
    found: tuple[Tensor, Tensor] = _Score.apply(hidden, weight, labels, manner)
    return found


class _Score(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, manner: Manner
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows, matrix = hidden.to(manner.dtype), weight.to(manner.dtype)
        found = []
        for some in _chunks(len(rows), manner):
            logits = _logits(rows[some], matrix, manner)
            total = logits.logsumexp(-1)
            logprobs = logits.gather(-1, labels[some, None])[:, 0] - total
            mean = torch.linalg.vecdot((logits - total[:, None]).exp_(), logits)
            found.append((logprobs, total - mean, total))
        logprobs, entropy, totals = (torch.cat(column) for column in zip(*found, strict=True))
        ctx.save_for_backward(rows, weight, labels, totals, entropy)
        ctx.manner, ctx.given = manner, hidden.dtype
        return logprobs, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, labels, totals, entropy = ctx.saved_tensors
        manner: Manner = ctx.manner
        matrix = weight.to(manner.dtype)
        by_logprob = torch.zeros_like(totals) if by_logprob is None else by_logprob
        by_rows = []
        by_weight = torch.zeros_like(weight, dtype=totals.dtype) if ctx.needs_input_grad[1] else None
        for some in _chunks(len(rows), manner):
            logprobs = _logits(rows[some], matrix, manner) - totals[some, None]
            slope = logprobs.exp()
            per_token = by_logprob[some, None]
            if by_entropy is None:
                slope *= -per_token
            else:
                more = logprobs.add_(entropy[some, None]).mul_(by_entropy[some, None])
                slope *= more.add_(per_token).neg_()
            slope.scatter_add_(-1, labels[some, None], per_token)
            slope = slope.div_(manner.temperature).to(manner.dtype)
            by_rows.append(_multiply_in_parts(slope, matrix))
            if by_weight is not None:
                by_weight += product(slope.T, rows[some])
        by_hidden = torch.cat(by_rows).to(ctx.given)
        return by_hidden, by_weight if by_weight is None else by_weight.to(weight.dtype), None, None


def _chunks(rows: int, manner: Manner) -> Iterator[slice]:
    for start in range(0, max(rows, 1), manner.chunk):
        yield slice(start, start + manner.chunk)


def _logits(rows: Tensor, matrix: Tensor, manner: Manner) -> Tensor:
    logits = product(rows, matrix.T)
    return logits if manner.temperature == 1.0 else logits.div_(manner.temperature)


def _multiply_in_parts(slope: Tensor, matrix: Tensor) -> Tensor:
    """Multiply, summing over the vocabulary in parts."""
    first, *others = zip(slope.split(PART, -1), matrix.split(PART), strict=True)
    total = product(*first)
    for part in others:
        total += product(*part)
    return total
