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
from polar.errors import InvalidInput, NotInstalled
from polar.gateway.server import Gateway
from polar.gateway.session import SessionGrant, new_key
from polar.harnesses import preset
from polar.harnesses.base import provider_environment
from polar.harnesses.preset import AgentSettings
from polar.models.component import Component
from polar.models.session import AgentEnd, SessionResult, SessionStatus
from polar.models.task import Budgets, SamplingPin
from polar.node.agent import DEFAULT_MAX_TOKENS
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
    " configure the program with them. Agents that need more are known by the name of their command: {known}."
)

_OPENCODE = """
{"model": "polar/$model", "small_model": "polar/$model", "provider": {"polar": {
    "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$url/v1", "apiKey": "$key"},
    "models": {"$model": {"limit": {"context": $max_context, "output": $max_tokens}}}}}}
"""
_KNOWN = {
    "mini": AgentSettings(env={"MSWEA_MODEL_NAME": "openai/$model", "MSWEA_COST_TRACKING": "ignore_errors"}),
    "opencode": AgentSettings(env={"OPENCODE_CONFIG_CONTENT": _OPENCODE}),
}
"""Agents besides those of presets that do not take their model from its provider's variables."""


def known_agents() -> dict[str, AgentSettings]:
    """Return what points agents at the gateway by the names of their commands."""
    presets = map(preset.preset, preset.names())
    return _KNOWN | {one.command: one.connect for one in presets}


@dataclass(slots=True)
class ProxySession:
    """One open session that any program may use."""

    url: str
    key: str
    model: ModelInfo
    capture: Path
    recording: Path
    home: Path
    """A temporary directory with configuration for agents that read the address of their model from files."""
    result: SessionResult | None = None
    """The result, set when the session is closed."""

    @property
    def environment(self) -> dict[str, str]:
        told = provider_environment(self.url, self.key, self.model.name)
        return told | {"CODEX_HOME": str(self.home)}

    def launch(self, command: Sequence[str]) -> tuple[Sequence[str], dict[str, str]]:
        """Return a program's command and variables, with what else it needs if it is known by its name."""
        settings = known_agents().get(Path(command[0]).name, AgentSettings())
        values = {
            "url": self.url,
            "key": self.key,
            "model": self.model.name,
            "max_context": self.model.max_context,
            "max_tokens": min(DEFAULT_MAX_TOKENS, self.model.max_context // 2),
            "home": str(self.home),
            "servers": {},
            "server_list": [],
        }
        for path, content in preset.documents(settings, values).items():
            Path(path).write_bytes(content)
        arguments, env = preset.arguments(settings, values), preset.variables(settings, values)
        return (command[0], *arguments, *command[1:]), self.environment | env


@asynccontextmanager
async def proxy_session(
    settings: Settings, sampling: SamplingPin, say: Say, *, max_seconds: float | None = None
) -> AsyncIterator[ProxySession]:
    """Serve one session during the block, for `max_seconds` at most, then write its recording."""
    capture = settings.data_dir / "capture.log"
    with _record_directory(settings.data_dir), _own(capture):
        async with data_plane(settings, say) as plane:
            gateway = plane.gateway
            with _home(gateway.url) as home:
                session = ProxySession(
                    url=gateway.url,
                    key=new_key(),
                    model=plane.model,
                    capture=capture,
                    recording=settings.data_dir / "recording",
                    home=home,
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
def _own(capture: Path) -> Iterator[None]:
    """Create the capture, which must be nobody else's; remove it again if nothing was written to it."""
    try:
        capture.touch(exist_ok=False)
    except FileExistsError:
        raise InvalidInput(
            f"{capture}: another `polar proxy` writes it, or was killed and left it",
            hint="name another directory with --out",
        ) from None
    try:
        yield
    finally:
        if capture.exists() and capture.stat().st_size == 0:
            capture.unlink()


@contextmanager
def _home(url: str) -> Iterator[Path]:
    """Make a temporary directory with a copy of the user's Codex configuration, with our base URL."""
    own = environment_codex_home() / "config.toml"
    lines = own.read_text().splitlines() if own.is_file() else []
    tables = (place for place, line in enumerate(lines) if line.lstrip().startswith("["))
    first_table = next(tables, len(lines))
    kept = [line for line in lines[:first_table] if not _CODEX_PROVIDER.match(line)]
    with tempfile.TemporaryDirectory(prefix="polar-proxy-", ignore_cleanup_errors=True) as home:
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
    try:
        process = await asyncio.create_subprocess_exec(*command, env=child_environment(environment))
    except OSError as error:
        raise NotInstalled(f"{command[0]}: cannot be started: {error.strerror}") from None
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
