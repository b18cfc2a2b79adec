"""A gateway around one program: no server, no tasks, no sandbox, but every token captured."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from polar import plugins
from polar.config.settings import Settings
from polar.engines.base import ModelInfo
from polar.errors import NotInstalled
from polar.gateway.gateways import Gateways
from polar.gateway.session import SessionGrant, new_key
from polar.models.component import Component
from polar.models.session import AgentEnd, SessionResult, SessionStatus
from polar.models.task import Budgets, SamplingPin
from polar.stack import Say, data_plane
from polar.trajectory import recording
from polar.trajectory.base import Builder

SESSION = "proxy"
END_SECONDS = 10.0
"""How long a program that is interrupted may take to end before it is killed."""


@dataclass(slots=True)
class Wrapped:
    """One open session that any program may use."""

    url: str
    key: str
    model: ModelInfo
    capture: Path
    recording: Path
    result: SessionResult | None = None
    """What was recorded; set when the session is closed."""

    @property
    def environment(self) -> dict[str, str]:
        """Base URL and key under every name that SDKs and harnesses look for."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.model.name,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.model.name,
            "GOOGLE_GEMINI_BASE_URL": self.url,
            "GEMINI_API_KEY": self.key,
            "GOOGLE_API_KEY": self.key,
            "GEMINI_MODEL": self.model.name,
            "POLAR_GATEWAY_URL": self.url,
            "POLAR_KEY": self.key,
            "POLAR_MODEL": self.model.name,
        }


@asynccontextmanager
async def wrapped(
    settings: Settings, sampling: SamplingPin, say: Say, *, max_seconds: float | None = None
) -> AsyncIterator[Wrapped]:
    """Serve one session while the body runs, then write its recording.

    After `max_seconds` the program's calls are refused as out of budget.
    """
    with _made(settings.data_dir):
        async with data_plane(_with_one_gateway(settings), say) as plane:
            gateway = plane.gateway
            with gateway.placed(SESSION) as address:
                session = Wrapped(
                    url=f"http://{address.host}:{address.port}",
                    key=new_key(),
                    model=plane.model,
                    capture=settings.data_dir / "capture.log",
                    recording=settings.data_dir / "recording",
                )
                await gateway.open_session(
                    SessionGrant(
                        *(SESSION, session.key, session.capture, sampling, Budgets()),
                        serves_any_name=True,
                        deadline_seconds=max_seconds,
                    )
                )
                try:
                    yield session
                finally:
                    await _close(gateway, session)


@contextmanager
def _made(directory: Path) -> Iterator[None]:
    """A directory for what is recorded, and for the log of an engine; gone again if there is neither."""
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if is_new and not any(directory.iterdir()):
            directory.rmdir()


def _with_one_gateway(settings: Settings) -> Settings:
    """One session keeps one gateway busy at most."""
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"workers": 1})})


async def _close(gateway: Gateways, session: Wrapped) -> None:
    await gateway.close_session(SESSION)
    builder: Builder = plugins.create("builders", "builder", Component(name="prefix_merging"))
    trajectory = builder.build_capture(session.capture.read_bytes())
    session.result = SessionResult(
        session_id=SESSION,
        task_id=SESSION,
        sample=0,
        attempt=1,
        status=SessionStatus.COMPLETED,
        agent_end=AgentEnd.EXITED,
        stats=trajectory.stats,
        model=session.model.name,
        logprobs_mode=session.model.logprobs_mode,
        has_recording=trajectory.stats.completions > 0,
    )
    if session.result.has_recording:
        blob = recording.encode(session.capture.read_bytes(), trajectory, session.result)
        session.recording.write_bytes(blob)
    session.capture.unlink()


def check(command: Sequence[str]) -> None:
    """Raise if there is no such program, before anything is started for it."""
    if shutil.which(command[0]) is None:
        raise NotInstalled(f"{command[0]}: no such program")


async def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program with these variables added to ours; its exit code, as a shell gives it."""
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment})
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
        raise
    return code if code >= 0 else 128 - code
