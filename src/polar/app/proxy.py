"""A gateway around one program, without server, tasks or sandbox, that captures every token."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from polar.app.stack import Say, data_plane
from polar.config import plugins
from polar.config.settings import Settings, child_environment, environment_codex_home
from polar.engines.base import ModelInfo
from polar.errors import NotInstalled
from polar.gateway.server import Gateway
from polar.gateway.session import SessionGrant, new_key
from polar.harnesses.base import provider_environment
from polar.models.component import Component
from polar.models.session import AgentEnd, SessionResult, SessionStatus
from polar.models.task import Budgets, SamplingPin
from polar.recordings import recording
from polar.recordings.capture import parse_capture
from polar.trajectory.base import Builder

SESSION = "proxy"
_CODEX_PROVIDER = re.compile(r"\s*(openai_base_url|model_provider|profile)\s*=")
"""Settings that may say where Codex finds its model."""
END_SECONDS = 10.0
"""Seconds an interrupted program gets to end before it is killed."""

NO_CALLS = (
    "no model call was recorded: the program may take its base URL from a configuration file, an option or"
    " its code instead of the environment. `polar proxy` without a program prints the variables it sets;"
    " configure the program with them."
)


@dataclass(slots=True)
class ProxySession:
    """One open session that any program may use."""

    url: str
    key: str
    model: ModelInfo
    capture: Path
    recording: Path
    codex_home: Path
    """A configuration directory for Codex, which reads the address of its model only from there."""
    result: SessionResult | None = None
    """The result, set when the session is closed."""

    @property
    def environment(self) -> dict[str, str]:
        told = provider_environment(self.url, self.key, self.model.name)
        return told | {"CODEX_HOME": str(self.codex_home)}


@asynccontextmanager
async def proxy_session(
    settings: Settings, sampling: SamplingPin, say: Say, *, max_seconds: float | None = None
) -> AsyncIterator[ProxySession]:
    """Serve one session during the block, for `max_seconds` at most, then write its recording."""
    with _record_directory(settings.data_dir):
        async with data_plane(settings, say) as plane:
            gateway = plane.gateway
            with _codex_home(gateway.url) as codex_home:
                session = ProxySession(
                    url=gateway.url,
                    key=new_key(),
                    model=plane.model,
                    capture=settings.data_dir / "capture.log",
                    recording=settings.data_dir / "recording",
                    codex_home=codex_home,
                )
                gateway.open_session(
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
def _record_directory(directory: Path) -> Iterator[None]:
    """Create a directory for recordings and an engine's log; remove it again if it stays empty."""
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if is_new and not any(directory.iterdir()):
            directory.rmdir()


@contextmanager
def _codex_home(url: str) -> Iterator[Path]:
    """Copy the user's Codex configuration to a temporary home, with our base URL."""
    own = environment_codex_home() / "config.toml"
    lines = own.read_text().splitlines() if own.is_file() else []
    tables = (place for place, line in enumerate(lines) if line.lstrip().startswith("["))
    first_table = next(tables, len(lines))
    kept = [line for line in lines[:first_table] if not _CODEX_PROVIDER.match(line)]
    with tempfile.TemporaryDirectory(prefix="polar-codex-", ignore_cleanup_errors=True) as home:
        settings = [f'openai_base_url = "{url}/v1"', *kept, *lines[first_table:], ""]
        (Path(home) / "config.toml").write_text("\n".join(settings))
        yield Path(home)


async def _close(gateway: Gateway, session: ProxySession) -> None:
    await gateway.close_session(SESSION)
    builder: Builder = plugins.create("builders", "builder", Component(name="prefix_merging"))
    tree = parse_capture(session.capture.read_bytes())
    trajectory = builder.build(tree)
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
        renderer=session.model.renderer,
        has_recording=trajectory.stats.completions > 0,
    )
    if session.result.has_recording:
        blob = recording.encode(tree, trajectory, session.result)
        session.recording.write_bytes(blob)
    session.capture.unlink()


def check(command: Sequence[str]) -> None:
    """Raise if there is no such program, before anything is started for it."""
    if shutil.which(command[0]) is None:
        raise NotInstalled(f"{command[0]}: no such program")


async def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program with these variables added to ours; return its exit code as a shell would."""
    process = await asyncio.create_subprocess_exec(*command, env=child_environment(environment))
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
