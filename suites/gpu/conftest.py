"""What needs a CUDA device; without one the suite fails rather than looking as if it had passed."""

from __future__ import annotations

import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    if not torch.cuda.is_available():
        pytest.exit("suites/gpu needs a CUDA device that this torch build can use", returncode=2)
