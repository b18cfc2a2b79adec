"""Agents that are described by data alone: one YAML file each in `presets`, run by one class."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, Field

from polar.assets.cache import DownloadFailed, asset, lock_tag
from polar.assets.node import native, node
from polar.assets.pypi import PYTHON_TAG, install_python, python_program, python_root
from polar.harnesses.base import (
    LOCKS,
    NODE,
    Harness,
    HarnessContext,
    PinnedHarness,
    json_file,
    mcp_servers,
    plain_text,
)
from polar.runtimes.base import Command

PRESETS = Path(__file__).with_name("presets")
PYTHON = PurePosixPath(python_root())
INSTRUCTION = ".polar/instruction.txt"
PREPARED = "prepared"
"""Names the directory that a preset's preparation fills."""

LAUNCH = """
import site, sys
from importlib import import_module
_, packages, (module, _, function) = sys.argv.pop(0), sys.argv.pop(0), sys.argv[0].partition(":")
site.addsitedir(packages)
sys.exit(getattr(import_module(module), function)())
"""
"""Finds the packages without an environment variable, which the agent's commands would inherit."""

Values = Mapping[str, Any]
"""What `$name` stands for in a preset."""


class AgentSettings(BaseModel):
    """Variables, arguments and files of an agent, in which `$name` stands for a value."""

    model_config = {"extra": "forbid", "frozen": True}

    env: dict[str, str] = Field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    files: dict[str, Any] = Field(default_factory=dict)
    """Documents by their path, which begins with `$home`."""


class Preset(BaseModel):
    """One agent: what is fetched, and how it is run.

    Its values are `$url` (the gateway's, without `/v1`), `$key`, `$model`, `$max_context`, `$max_tokens`,
    `$home`, `$workspace`, `$package`, `$prepared`, `$instruction` (a file), and the task's tools: `$servers`
    by name, or `$server_list` as Continue has them.
    """

    model_config = {"extra": "forbid", "frozen": True}

    title: str
    package: str
    """The package of npm or PyPI."""
    version: str
    command: str
    """The name under which users run it."""
    program: str
    """A path in npm's package, run by Node.js if it ends in `.js`, or `module:function` in Python's."""
    builds: dict[str, str] = Field(default_factory=dict)
    """The package of npm for each `system-machine`; empty for a Python package."""
    prepare: AgentSettings | None = None
    """How it is run once when it is installed, to fill `$prepared`."""
    connect: AgentSettings
    """What points it at the gateway; `polar proxy` sets this alone."""
    headless: AgentSettings
    """What it further needs to run by itself, in a home of its own."""
    dialect: str

    @property
    def takes_tools(self) -> bool:
        return "$server" in str((self.connect, self.headless))


@cache
def preset(name: str) -> Preset:
    return Preset.model_validate(yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))


def names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def filled(value: Any, values: Values) -> Any:
    """Return a template with its values; text that is a name and nothing else becomes the value itself."""
    match value:
        case str() if value.startswith("$") and value[1:] in values:
            return values[value[1:]]
        case str():
            return Template(value).substitute(values)
        case dict():
            return {filled(key, values): filled(item, values) for key, item in value.items()}
        case list() | tuple():
            return [filled(item, values) for item in value]
    return value


def arguments(settings: AgentSettings, values: Values) -> tuple[str, ...]:
    return tuple(str(filled(argument, values)) for argument in settings.arguments)


def variables(settings: AgentSettings, values: Values) -> dict[str, str]:
    return {name: str(filled(value, values)) for name, value in settings.env.items()}


def documents(settings: AgentSettings, values: Values) -> dict[PurePosixPath, bytes]:
    """Return the files, encoded by their suffix."""
    contents = {PurePosixPath(path): content for path, content in filled(settings.files, values).items()}
    return {path: _encoded(path, content) for path, content in contents.items()}


def _encoded(path: PurePosixPath, content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode()
    return json_file(content) if path.suffix == ".json" else yaml.safe_dump(content).encode()


class PresetHarness(PinnedHarness):
    """An agent as its preset describes it, with its state below HOME."""

    name: ClassVar[str]
    preset: ClassVar[Preset]

    class Options(Harness.Options):
        arguments: tuple[str, ...] = ()
        """Further arguments of the agent's command."""
        env: dict[str, str] = Field(default_factory=dict)
        """Further environment variables, over which Polar's own take precedence."""

    options: Options

    @property
    def _package(self) -> PurePosixPath:
        return PurePosixPath("/opt/polar") / self.name

    @property
    def _prepared(self) -> PurePosixPath:
        return PurePosixPath("/opt/polar") / f"{self.name}-{PREPARED}"

    def fetch(self) -> dict[PurePosixPath, Path]:
        if not self.preset.builds:
            lock = LOCKS / f"{self.name}.txt"
            name = f"{self.name}-{self.version}-{lock_tag(lock)}-{PYTHON_TAG}"
            return {PYTHON: python_root(), self._package: asset(name, partial(install_python, lock))}
        package = native(self.name, self.version, LOCKS / f"{self.name}.json")
        found = {self._package: package}
        if self.preset.program.endswith(".js"):
            found[NODE] = node()
        if self.preset.prepare is not None:
            prepare = partial(self._prepare, package)
            found[self._prepared] = asset(f"{package.name}-{PREPARED}", prepare)
        return found

    def _prepare(self, package: Path, into: Path) -> None:
        assert self.preset.prepare is not None
        values = {"package": str(package), PREPARED: str(into)}
        command = (str(package / self.preset.program), *self.preset.prepare.arguments)
        with tempfile.TemporaryDirectory() as home:
            env = {"HOME": home, **variables(self.preset.prepare, values)}
            run = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if run.returncode != 0:
            raise DownloadFailed(f"{self.preset.title} does not start on this machine: {run.stderr.strip()}")

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        preset, values = self.preset, self._values(context)
        instruction = {context.home / INSTRUCTION: plain_text(context.instruction)}
        return instruction | documents(preset.connect, values) | documents(preset.headless, values)

    def command(self, context: HarnessContext) -> Command:
        preset, values = self.preset, self._values(context)
        own = (*arguments(preset.connect, values), *arguments(preset.headless, values))
        return Command(
            argv=(*self.program(context), *own, *self.options.arguments),
            env=self.options.env | variables(preset.connect, values) | variables(preset.headless, values),
            stdin=plain_text(context.instruction),
        )

    def program(self, context: HarnessContext) -> tuple[str, ...]:
        """Return the agent's own command without arguments."""
        package, program = str(context.paths[self._package]), self.preset.program
        if not self.preset.builds:
            python = str(context.paths[PYTHON] / python_program())
            # Without -I and -S the workspace or the interpreter's own packages could take precedence.
            return (python, "-I", "-S", "-c", LAUNCH, package, program)
        if program.endswith(".js"):
            return (str(context.paths[NODE] / "bin" / "node"), f"{package}/{program}")
        return (f"{package}/{program}",)

    def _values(self, context: HarnessContext) -> Values:
        servers = mcp_servers(context)
        places = {"package": self._package} | ({PREPARED: self._prepared} if self.preset.prepare else {})
        return {
            **{name: str(context.paths[place]) for name, place in places.items()},
            "url": context.gateway_url,
            "key": context.key,
            "model": context.model,
            "max_context": context.max_context,
            "max_tokens": context.max_tokens,
            "home": str(context.home),
            "workspace": str(context.workspace),
            "instruction": str(context.home / INSTRUCTION),
            "servers": servers,
            "server_list": [_listed(name, server) for name, server in servers.items()],
        }


def _listed(name: str, server: dict[str, Any]) -> dict[str, Any]:
    if "command" in server:
        return {"name": name, **server}
    options = {"headers": server["headers"]}
    return {"name": name, "type": "streamable-http", "url": server["url"], "requestOptions": options}


@cache
def _harness(name: str) -> type[PresetHarness]:
    """Return the class of a preset, for the entry point of its name."""
    known = preset(name)
    about = {
        "name": name,
        "preset": known,
        "version": known.version,
        "takes_tools": known.takes_tools,
        "__doc__": f"{known.title}, run headless.",
        "__module__": __name__,
    }
    return type(known.title, (PresetHarness,), about)


def __getattr__(name: str) -> type[PresetHarness]:
    if name not in names():
        raise AttributeError(name)
    return _harness(name)
