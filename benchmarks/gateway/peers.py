"""The gateways we compare with, from PyPI, each in an environment of its own in the cache."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polar.assets.cache import asset


@dataclass(frozen=True, slots=True)
class Peer:
    """One program and what it needs beside itself."""

    name: str
    requirements: Sequence[str]
    script: str
    """In the environment's `bin`; run by its interpreter: its first line names where it was made."""

    def environment(self) -> Path:
        tag = f"py{sys.version_info.major}.{sys.version_info.minor}"
        name = "-".join(part.replace("==", "-").replace("[proxy]", "") for part in self.requirements[:1])
        return asset(f"bench-{name}-{tag}", self._make)

    def _make(self, into: Path) -> None:
        print(f"installing {self.requirements[0]}, minutes the first time …", file=sys.stderr, flush=True)
        venv.create(into, with_pip=True)
        pip = (str(into / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
        subprocess.run([*pip, "install", "--quiet", *self.requirements], check=True)

    def command(self, *arguments: str) -> list[str]:
        directory = self.environment() / "bin"
        return [str(directory / "python"), str(directory / self.script), *arguments]


RLLM = Peer("rllm-model-gateway", ("rllm-model-gateway==0.1.0", "uvicorn[standard]"), "rllm-model-gateway")
LITELLM = Peer("litellm", ("litellm[proxy]==1.106.2",), "litellm")
