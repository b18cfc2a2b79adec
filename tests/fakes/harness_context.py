"""What a harness is told of a session, for tests that never start one."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from polar.harnesses.base import HarnessContext


def harness_context(installed: dict[PurePosixPath, str], **changes: Any) -> HarnessContext:
    """A session whose installation's mounts are found inside at the given paths."""
    told: dict[str, Any] = {
        "instruction": "Do it.",
        "model": "small",
        "gateway_url": "http://127.0.0.1:1234",
        "key": "secret",
        "workspace": PurePosixPath("/workspace"),
        "home": PurePosixPath("/home/agent"),
        "tmp": PurePosixPath("/tmp"),
        "max_context": 8192,
        "max_tokens": 1024,
        "paths": {target: PurePosixPath(inside) for target, inside in installed.items()},
    }
    return HarnessContext(**{**told, **changes})
