"""One agent harness: how it is installed, configured and started. Never patched, only configured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import ClassVar

from pydantic import BaseModel

from polar.runtimes.base import Command, ToolDirectory


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
