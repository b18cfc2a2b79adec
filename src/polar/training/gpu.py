"""How busy a GPU is, as its driver says: sampled beside the work, from nothing but the driver's library."""

from __future__ import annotations

import ctypes
import threading
from statistics import fmean
from typing import Self

import torch

LIBRARY = "libnvidia-ml.so.1"
EVERY_SECONDS = 0.1
"""The driver's own number is over the last sixth of a second to a second, whichever GPU it is."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Busy:
    """The share of time in which the GPU computes anything, of whichever process.

    On a machine without a GPU, or where the driver does not say, there is nothing to tell.
    """

    def __init__(self, device: torch.device) -> None:
        self._samples: list[float] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        opened = _open(device)
        if opened is not None:
            self._thread = threading.Thread(target=self._watch, args=opened, name="polar-gpu", daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self) -> None:
        """Forget what was seen before."""
        self._samples = []

    def share(self) -> float | None:
        """Since the beginning, between 0 and 1; None: not known."""
        return fmean(self._samples) if self._samples else None

    def _watch(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        found = _Utilization()
        while not self._ending.wait(EVERY_SECONDS):
            if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) == 0:
                self._samples.append(found.gpu / 100)


def _open(device: torch.device) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The driver's library and its handle of this device, found by its number in every process."""
    if device.type != "cuda":
        return None
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    handle = ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None
    return library, handle
