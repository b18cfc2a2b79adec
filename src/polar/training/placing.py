"""Arrays brought to where they are computed with, without anybody waiting for the copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def placed(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device.

    A copy from ordinary memory makes the program wait until the GPU has done all it was given before. From
    pinned memory it is one more thing that the GPU is given, and kernels are queued without a gap.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
