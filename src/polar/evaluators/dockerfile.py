"""As much of a Dockerfile as needs no image to be built: where it works, and which files it copies there."""

from __future__ import annotations

import base64
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from polar.errors import InvalidInput
from polar.models.task import FileContent

DEFAULT_WORKDIR = "/app"
WITHOUT_EFFECT = frozenset({"FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "STOPSIGNAL"})
"""Instructions that change nothing for a command that is run in the container."""

ARCHIVES = (".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")
"""What ADD would unpack."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """What a Dockerfile asks for."""

    workdir: str
    files: dict[str, FileContent]
    """Paths below `workdir` → what is copied there."""
    unmet: tuple[str, ...]
    """Instructions that only a built image would honour, as they are written."""


def read_dockerfile(context: Path) -> Workplace:
    """What `context/Dockerfile` asks for; without one, nothing."""
    file = context / "Dockerfile"
    if not file.is_file():
        return Workplace(DEFAULT_WORKDIR, {}, ())
    instructions = list(_instructions(_text(file)))
    unmet = [text for text in (".dockerignore",) if (context / text).exists()]
    workdir = _workdir([argument for word, argument in instructions if word == "WORKDIR"])
    files: dict[str, FileContent] = {}
    current = PurePosixPath("/")
    for word, argument in instructions:
        if word == "WORKDIR":
            current = current / argument.strip("\"'")
        elif word in ("COPY", "ADD"):
            copied = _copy(context, argument, current, PurePosixPath(workdir))
            if copied is None:
                unmet.append(f"{word} {argument}")
            else:
                files |= copied
        elif word not in WITHOUT_EFFECT or (word == "FROM" and " as " in argument.lower()):
            unmet.append(f"{word} {argument}")
    return Workplace(workdir, files, tuple(unmet))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file}: cannot be read: {error}") from None


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        word, _, argument = line.strip().partition(" ")
        if word:
            found.append((word.upper(), " ".join(argument.split())))
    return found


def _workdir(named: list[str]) -> str:
    path = PurePosixPath("/")
    for name in named:
        path = path / name.strip("\"'")
    return str(path) if path != PurePosixPath("/") else DEFAULT_WORKDIR


def _copy(
    context: Path, argument: str, current: PurePosixPath, workdir: PurePosixPath
) -> dict[str, FileContent] | None:
    """What one COPY puts below the working directory; None if it does more than that."""
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
                place = _normal(destination / inner.as_posix())
                if place is None or not place.is_relative_to(workdir) or place == workdir:
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
        raise InvalidInput(f"{context / 'Dockerfile'}: COPY {pattern}: there is no such file")
    return found


def _normal(path: PurePosixPath) -> PurePosixPath | None:
    parts = [part for part in path.parts if part != "."]
    return None if ".." in parts else PurePosixPath(*parts)


def file_content(path: Path) -> FileContent:
    """A file of this machine as a task carries it."""
    data = path.read_bytes()
    executable = bool(path.stat().st_mode & 0o100)
    try:
        return FileContent(text=data.decode(), executable=executable)
    except UnicodeDecodeError:
        return FileContent(base64=base64.b64encode(data).decode(), executable=executable)
