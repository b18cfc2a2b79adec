"""A Harbor task directory as it is, read into the parts of a task of ours.

task.toml           timeouts, resources, the verifier's environment
instruction.md      what the agent is told
environment/        the Dockerfile and what it copies
tests/              test.sh and what it needs; laid out as /tests once the agent is gone
solution/           solve.sh, for people and for checks of the task itself
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from polar.config.settings import explain
from polar.errors import InvalidInput
from polar.evaluators.dockerfile import file_content, read_dockerfile
from polar.models.task import FileContent

TESTS, LOGS = "/tests", "/logs"
"""Where Harbor's scripts find their tests and leave their reward."""
MAX_FILES, MAX_BYTES = 5_000, 64 * 1024 * 1024


class _Section(BaseModel):
    model_config = {"extra": "ignore", "frozen": True}


class _Agent(_Section):
    timeout_sec: float | None = Field(default=None, gt=0)


class _Verifier(_Section):
    timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: str = "shared"


class _Environment(_Section):
    build_timeout_sec: float | None = Field(default=None, gt=0)
    docker_image: str | None = None
    os: str = "linux"


class HarborConfig(_Section):
    """What is read of task.toml; metadata and keys of other versions of the format are left alone."""

    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    metadata: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HarborTask:
    name: str
    instruction: str
    config: HarborConfig
    workdir: str
    files: dict[str, FileContent]
    """What the agent finds in its workspace."""
    tests: dict[str, FileContent]
    solution: dict[str, FileContent]
    """solve.sh and what it needs; empty where the task has none."""
    unmet: tuple[str, ...]
    """What the environment asks for that only an image built from its Dockerfile would have."""

    def fields(self, *, runtime: str = "bubblewrap") -> dict[str, Any]:
        """The fields of a task that follow from the directory: all but its id, harness and samples."""
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
            # Making a second sandbox and carrying the workspace there is not the verifier's time.
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

    Without an image an environment can only be copied files over the host's own programs. What
    else its Dockerfile asks for is refused, unless `ignore_unmet` says that the host has it.
    """
    config = _config(directory / "task.toml")
    if (directory / "steps").is_dir():
        raise InvalidInput(f"{directory}: tasks of several steps are not supported")
    place = read_dockerfile(directory / "environment")
    unmet = list(place.unmet)
    unmet += [name for name in _COMPOSE if (directory / "environment" / name).exists()]
    if config.environment.docker_image and not (directory / "environment" / "Dockerfile").is_file():
        unmet.append(f"docker_image = {config.environment.docker_image!r}")
    if config.environment.os != "linux":
        unmet.append(f"os = {config.environment.os!r}")
    if unmet and not ignore_unmet:
        raise InvalidInput(
            f"{directory}: its environment needs an image to be built: {'; '.join(unmet)}",
            hint="use a runtime with images, or say that the host has what is needed",
        )
    tests = _files(directory / "tests")
    if "test.sh" not in tests:
        raise InvalidInput(f"{directory / 'tests' / 'test.sh'}: a Harbor task needs it")
    return HarborTask(
        name=directory.name,
        instruction=_instruction(directory / "instruction.md"),
        config=config,
        workdir=place.workdir,
        files=place.files,
        tests=tests,
        solution=_files(directory / "solution") if (directory / "solution" / "solve.sh").is_file() else {},
        unmet=tuple(unmet),
    )


_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


def _config(file: Path) -> HarborConfig:
    try:
        document = tomllib.loads(file.read_text())
        config = HarborConfig.model_validate(document)
    except OSError as error:
        raise InvalidInput(f"{file}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise InvalidInput(f"{file}: {explain(error)}") from None
    except ValueError as error:
        raise InvalidInput(f"{file}: not TOML: {error}") from None
    for name, value in config.verifier.env.items():
        if "${" in value:
            raise InvalidInput(
                f"{file}: verifier.env.{name}: is taken from the host's environment, which no sandbox sees",
                hint="write its value",
            )
    return config


def _instruction(file: Path) -> str:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file}: cannot be read: {error}") from None
    if not text.strip():
        raise InvalidInput(f"{file}: is empty")
    return text


def _files(directory: Path) -> dict[str, FileContent]:
    """Every file below a directory; links are followed, as they are when it is copied into an image."""
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
