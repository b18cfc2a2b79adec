"""Whether this machine can run a sandbox: where it cannot, tests of it are skipped loudly, and fail in CI."""

from __future__ import annotations

import os

import pytest

from polar.config import plugins


async def require_runtime(name: str) -> None:
    reason = await plugins.load("runtimes", name).unavailable()
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"runtime {name} must work where CI runs: {reason}")
    pytest.skip(f"runtime {name} was NOT TESTED on this machine: {reason}")
