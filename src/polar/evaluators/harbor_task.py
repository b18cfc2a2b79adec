"""Reads a Harbor task directory, unchanged, into the fields of a Polar task.

task.toml           timeouts, resources, the verifier's environment
instruction.md      what the agent is told
environment/        the Dockerfile and what it copies
tests/              test.sh and what it needs, unpacked as /tests after the agent has ended
solution/           solve.sh, for people and for checks of the task itself
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from polar.errors import InvalidInput, explain
from polar.models.task import FileContent

TESTS, LOGS = "/tests", "/logs"
"""Where Harbor's scripts find their tests and write their reward."""
MAX_FILES, MAX_BYTES = 5_000, 64 * 1024 * 1024


class _Section(BaseModel):
    model_config = {"extra": "ignore", "frozen": True}


class _AgentSection(_Section):
    timeout_sec: float | None = Field(default=None, gt=0)


class _VerifierSection(_Section):
    timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: str = "shared"


class _EnvironmentSection(_Section):
    build_timeout_sec: float | None = Field(default=None, gt=0)
    docker_image: str | None = None
    os: str = "linux"


class HarborConfig(_Section):
    """The parts of task.toml that matter here; metadata and keys of other format versions are ignored."""

    agent: _AgentSection = _AgentSection()
    verifier: _VerifierSection = _VerifierSection()
    environment: _EnvironmentSection = _EnvironmentSection()
    metadata: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HarborTask:
    name: str
    instruction: str
    config: HarborConfig
    workdir: str
    files: dict[str, FileContent]
    """The files in the agent's workspace."""
    tests: dict[str, FileContent]
    solution: dict[str, FileContent]
    """solve.sh and what it needs; empty if the task has none."""
    unmet: tuple[str, ...]
    """Requirements of the environment that only an image built from its Dockerfile would meet."""

    def fields(self, *, runtime: str = "bubblewrap") -> dict[str, Any]:
        """Return the fields of a task that follow from the directory: all but its id, harness and samples."""
        config = self.config
        verifier: dict[str, Any] = {
            "tests": {path: file.model_dump(exclude_none=True) for path, file in self.tests.items()},
            "env": dict(config.verifier.env),
            "sandbox": "fresh" if config.verifier.environment_mode == "separate" else "live",
        }
        options = {"workspace": self.workdir, "directories": [TESTS, LOGS]} if runtime == "bubblewrap" else {}
        budgets = {"run_seconds": config.agent.timeout_sec}
        if config.verifier.timeout_sec:
            verifier["timeout_seconds"] = config.verifier.timeout_sec
            # The verifier's timeout does not include creating a second sandbox and copying the workspace.
            budgets["evaluate_seconds"] = config.verifier.timeout_sec + 60
        return {
            "instruction": self.instruction,
            "files": {path: file.model_dump(exclude_none=True) for path, file in self.files.items()},
            "runtime": {"name": runtime, "options": options},
            "evaluator": {"name": "harbor", "options": verifier},
            "budgets": {name: seconds for name, seconds in budgets.items() if seconds},
        }


def read_harbor_task(directory: Path, *, ignore_unmet: bool = False) -> HarborTask:
    """Read a task directory; InvalidInput names the file, and the field in it, that is wrong.

    Without an image, an environment can only be files copied over the host's own programs. Anything else
    in its Dockerfile is refused, unless `ignore_unmet` asserts that the host has it.
    """
    config = _config(directory / "task.toml")
    if (directory / "steps").is_dir():
        raise InvalidInput(f"{directory}: multi-step tasks are not supported")
    environment = directory / "environment"
    workdir, files, unmet = _read_dockerfile(environment)
    unmet += [name for name in _UNSUPPORTED if (environment / name).exists()]
    if config.environment.docker_image and not (environment / "Dockerfile").is_file():
        unmet.append(f"docker_image = {config.environment.docker_image!r}")
    if config.environment.os != "linux":
        unmet.append(f"os = {config.environment.os!r}")
    if unmet and not ignore_unmet:
        raise InvalidInput(
            f"{directory}: its environment requires an image: {'; '.join(unmet)}",
            hint="use a runtime with images, or set ignore_unmet if the host has what is needed",
        )
    tests = _files(directory / "tests")
    if "test.sh" not in tests:
        raise InvalidInput(f"{directory / 'tests' / 'test.sh'}: is missing")
    instruction = _text(directory / "instruction.md")
    if not instruction.strip():
        raise InvalidInput(f"{directory / 'instruction.md'}: is empty")
    return HarborTask(
        name=directory.name,
        instruction=instruction,
        config=config,
        workdir=workdir,
        files=files,
        tests=tests,
        solution=_files(directory / "solution") if (directory / "solution" / "solve.sh").is_file() else {},
        unmet=tuple(unmet),
    )


_UNSUPPORTED = (".dockerignore", "docker-compose.yaml", "docker-compose.yml")


def _config(file: Path) -> HarborConfig:
    try:
        config = HarborConfig.model_validate(tomllib.loads(_text(file)))
    except ValidationError as error:
        raise InvalidInput(f"{file}: {explain(error)}") from None
    except ValueError as error:
        raise InvalidInput(f"{file}: not TOML: {error}") from None
    for name, value in config.verifier.env.items():
        if "${" in value:
            raise InvalidInput(
                f"{file}: verifier.env.{name}: refers to the host's environment, which sandboxes do not see",
                hint="write the value itself",
            )
    return config


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file}: cannot be read: {error}") from None


def _files(directory: Path) -> dict[str, FileContent]:
    """Return every file below a directory; links are followed, as when it is copied into an image."""
    found: dict[str, FileContent] = {}
    size = 0
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        size += path.stat().st_size
        if len(found) >= MAX_FILES or size > MAX_BYTES:
            raise InvalidInput(f"{directory}: more than {MAX_FILES} files or {MAX_BYTES} bytes")
        found[path.relative_to(directory).as_posix()] = file_content(path)
    return found


DEFAULT_WORKDIR = "/app"
WITHOUT_EFFECT = frozenset({"FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "STOPSIGNAL"})
"""Instructions that do not affect a command run in the container."""

ARCHIVES = (".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")
"""Archives that ADD would unpack."""


def _read_dockerfile(context: Path) -> tuple[str, dict[str, FileContent], list[str]]:
    """Return the working directory, the files copied below it, and what only a built image would have."""
    file = context / "Dockerfile"
    instructions = _instructions(_text(file)) if file.is_file() else []
    named = [argument.strip("\"'") for word, argument in instructions if word == "WORKDIR"]
    workdir = PurePosixPath("/", *named)
    if not workdir.name:
        workdir = PurePosixPath(DEFAULT_WORKDIR)
    files: dict[str, FileContent] = {}
    unmet = []
    current = PurePosixPath("/")
    for word, argument in instructions:
        if word == "WORKDIR":
            current = current / argument.strip("\"'")
        elif word in ("COPY", "ADD") and (copied := _copy(context, argument, current, workdir)) is not None:
            files |= copied
        elif word not in WITHOUT_EFFECT or (word == "FROM" and " as " in argument.lower()):
            unmet.append(f"{word} {argument}")
    return str(workdir), files, unmet


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        word, _, argument = line.strip().partition(" ")
        if word:
            found.append((word.upper(), " ".join(argument.split())))
    return found


def _copy(
    context: Path, argument: str, current: PurePosixPath, workdir: PurePosixPath
) -> dict[str, FileContent] | None:
    """Return the files that one COPY adds below the working directory; None if it does anything else."""
    words = _words(argument)
    options = [word for word in words if word.startswith("--")]
    *sources, target = words[len(options) :] or [""]
    is_plain = all(option.startswith(("--chown=", "--link")) for option in options)
    is_remote = any("://" in name or name.endswith(ARCHIVES) for name in sources)
    if not is_plain or not sources or is_remote:
        return None
    destination = current / target
    into_directory = target.endswith("/") or target in (".", "./") or len(sources) > 1
    copied: dict[str, FileContent] = {}
    for source in sources:
        for path in _sources(context, source):
            is_directory = path.is_dir()
            for file in sorted(path.rglob("*")) if is_directory else [path]:
                if not file.is_file():
                    continue
                inner = file.relative_to(path) if is_directory else Path(file.name if into_directory else "")
                place = destination / inner.as_posix()
                if ".." in place.parts or not place.is_relative_to(workdir) or place == workdir:
                    return None
                copied[str(place.relative_to(workdir))] = file_content(file)
    return copied


def _words(argument: str) -> list[str]:
    if argument.startswith("["):
        try:
            return [str(word) for word in json.loads(argument)]
        except ValueError:
            return []
    return shlex.split(argument)


def _sources(context: Path, pattern: str) -> list[Path]:
    clean = pattern.lstrip("/").removeprefix("./") or "."
    if clean == ".":
        return [context]
    found = sorted(context.glob(clean))
    if not found:
        raise InvalidInput(f"{context / 'Dockerfile'}: COPY {pattern}: no such file")
    return found


def file_content(path: Path) -> FileContent:
    """Read a file of this machine into the form in which tasks carry files."""
    data = path.read_bytes()
    executable = bool(path.stat().st_mode & 0o100)
    try:
        return FileContent(text=data.decode(), executable=executable)
    except UnicodeDecodeError:
        return FileContent(base64=base64.b64encode(data).decode(), executable=executable)
