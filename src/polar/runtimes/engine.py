"""The command line of a container engine: orders it takes, and what its complaints mean."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from polar.config.settings import engine_environment
from polar.runtimes.base import Command, ImageNotFound, SandboxError, SandboxUnavailable

CALL_SECONDS = 120.0
"""How long one order to the engine may take; fetching an image has its own budget."""


class Engine(ABC):
    """The command line of a container engine."""

    def __init__(self, binary: str) -> None:
        self.binary = binary

    @abstractmethod
    def exec_argv(self, name: str, command: Command, cwd: PurePosixPath, env_file: Path) -> tuple[str, ...]:
        """How a command is run in a container."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """End a container and forget it; one that is not there is as good as removed."""

    async def call(self, *arguments: str, timeout: float = CALL_SECONDS) -> str:
        """Give the engine an order; what it printed."""
        try:
            process = await asyncio.create_subprocess_exec(
                self.binary,
                *arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=engine_environment(),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"{self.binary}: cannot be run: {error.strerror}") from None
        try:
            async with asyncio.timeout(timeout):
                stdout, stderr = await process.communicate()
        except TimeoutError:
            raise SandboxUnavailable(f"{self._shown(arguments)}: no answer within {timeout:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise self.failure(arguments, stderr.decode(errors="replace"))
        return stdout.decode(errors="replace").strip()

    def failure(self, arguments: Sequence[str], stderr: str) -> SandboxError:
        """What an engine's complaint means."""
        lines = [line.strip() for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)]
        message = f"{self._shown(arguments)}: {' '.join(lines)[-600:] or 'failed without a word'}"
        if _NO_IMAGE.search(stderr):
            return ImageNotFound(message, hint="check the image's name and the option pull")
        if _PASSING.search(stderr):
            return SandboxUnavailable(message)
        return SandboxError(message)

    def _shown(self, arguments: Sequence[str]) -> str:
        return f"{Path(self.binary).name} {arguments[0]}"


_NOISE = re.compile(r"\s*(See '.*--help'|Run '.*--help'|Usage:|time=\S+ level=(warning|info))", re.IGNORECASE)
_NO_IMAGE = re.compile(
    r"no such image|unable to find image|image not known|pull access denied|manifest unknown"
    r"|manifest for .* not found|invalid reference format|short-name .* did not resolve"
    r"|repository .* not found|could not open image|failed to (resolve reference|retrieve path)"
    r"|unable to pull|not found: manifest",
    re.IGNORECASE,
)
_PASSING = re.compile(
    r"cannot connect|connection (refused|reset)|i/o timeout|tls handshake timeout|deadline exceeded"
    r"|temporarily unavailable|no space left|cannot allocate memory|too many open files|unexpected eof"
    r"|toomanyrequests|service unavailable",
    re.IGNORECASE,
)


def container_name(root: Path) -> str:
    """Says whose it is, and is no other's."""
    return f"{name_prefix(root.parent)}{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}"


def name_prefix(sessions_root: Path) -> str:
    return f"polar-{node_label(sessions_root)}-"


def node_label(sessions_root: Path) -> str:
    return hashlib.sha256(os.fsencode(sessions_root.absolute())).hexdigest()[:12]


def csv_fields(*fields: str) -> str:
    """A value of `--mount`, which engines read as one line of comma-separated values."""
    return ",".join(
        f'"{field.replace(QUOTE, QUOTE * 2)}"' if {",", QUOTE} & set(field) else field for field in fields
    )


QUOTE = '"'
