"""One agent harness: how it is installed, configured and started. Never patched, only configured."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from pydantic import BaseModel

from polar.runtimes.base import Command, ToolDirectory

NODE = PurePosixPath("/opt/polar/node")
"""Where harnesses that need Node.js find it."""
LOCKS = Path(__file__).parent / "locks"
"""What pinned harnesses are made of, with the hash of each package."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A harness prepared once on a node and shared read-only by all its sandboxes."""

    version: str
    tools: tuple[ToolDirectory, ...] = ()


@dataclass(frozen=True, slots=True)
class HarnessContext:
    """What a harness may know of its session."""

    instruction: str
    model: str
    """The name under which the gateway serves the policy."""
    gateway_url: str
    """`http://host:port` as seen from inside the sandbox."""
    key: str
    """The session's secret; opens only this session's model calls."""
    workspace: PurePosixPath
    home: PurePosixPath
    tmp: PurePosixPath
    max_context: int
    max_tokens: int
    """How many tokens one answer may have."""
    paths: Mapping[PurePosixPath, PurePosixPath] = field(default_factory=dict)
    """Target of each tool directory of the installation → where it is inside this sandbox."""


class Harness(ABC):
    """One file a harness; `install` may download, everything else is pure."""

    asks_by_any_name: ClassVar[bool] = False
    """Whether it may ask for its model by a name of its own, which is then answered as the session's."""

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    async def install(self) -> Installation:
        """Prepare the harness in the cache; cheap when already there. NotInstalled says what to do."""

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        """Configuration files to put in place, by absolute path inside the sandbox."""
        return {}

    @abstractmethod
    def command(self, context: HarnessContext) -> Command:
        """The headless run of the instruction."""


class PinnedHarness(Harness):
    """A harness of one version, which is fetched once and found at fixed places inside."""

    version: ClassVar[str]

    async def install(self) -> Installation:
        directories = await asyncio.to_thread(self.fetch)
        tools = tuple(ToolDirectory(source, target) for target, source in directories.items())
        return Installation(self.version, tools)

    @abstractmethod
    def fetch(self) -> dict[PurePosixPath, Path]:
        """Its directories, by where they are wanted inside; downloaded unless they are in the cache."""


def plain_text(instruction: str) -> bytes:
    """The instruction as text: what begins with a slash a harness may take for a command of its own."""
    return (f"\n{instruction}" if instruction.startswith("/") else instruction).encode()


def json_file(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()


def prompt_files(
    directory: PurePosixPath, prompts: Mapping[str, str | None]
) -> dict[str, tuple[PurePosixPath, bytes]]:
    """Flag → file and content, for every prompt that is given: as an argument it could be too long."""
    return {
        flag: (directory / f"{flag.strip('-')}.md", text.encode())
        for flag, text in prompts.items()
        if text is not None
    }


def provider_environment(url: str, key: str, model: str) -> dict[str, str]:
    """Address, key and model of every provider's API, and Polar's own."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "CODEX_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        "GOOGLE_API_KEY": key,
        "GOOGLE_GENERATIVE_AI_API_KEY": key,
        "GEMINI_MODEL": model,
        "POLAR_GATEWAY_URL": url,
        "POLAR_KEY": key,
        "POLAR_MODEL": model,
    }
