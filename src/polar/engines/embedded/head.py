"""The last layer of a model in half precision: its logits, in float32.

Logits of 20 lie an eighth apart in bfloat16; a logprob made from such is off by some hundredths.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def product(left: Tensor, right: Tensor) -> Tensor:
    """Of two matrices. Factors of half precision are summed in float32, and the sums stay as they are."""
    if left.dtype.itemsize > 2:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def widen_logits(model: Any) -> None:
    """Have a model on a GPU give the logits of its last layer in float32."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.is_cuda:
        head.forward = MethodType(_logits, head)


def _logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    logits = product(hidden.flatten(0, -2), head.weight.T)
    if head.bias is not None:
        logits += head.bias
    return logits.unflatten(0, hidden.shape[:-1])
