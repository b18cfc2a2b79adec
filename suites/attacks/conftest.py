"""What exams need: a runtime to sit them in, the programs that grade them, and a judge.

They are sat in bubblewrap, and in containers of every engine that is installed here. What runners of a
language obey does not depend on the sandbox, so in containers only the attacks on everything are tried.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from polar.evaluators.attacks import Kind
from polar.evaluators.base import JudgeEndpoint
from polar.runtimes.base import ToolDirectory
from suites.attacks.exams import read_as_told
from suites.engines import PROGRAMS, lacking, running
from tests.fakes.judge_server import judging

ENGINES = [engine for engine in PROGRAMS if not lacking(engine)]
USR = ToolDirectory(Path("/usr"), PurePosixPath("/usr"))
ETC = ("alternatives", "ld.so.cache", "ssl/certs", "ssl/openssl.cnf")


def pytest_report_header() -> list[str]:
    lines = [f"exams are sat in {', '.join(['bubblewrap', *ENGINES])}{'' if ENGINES else ' ALONE'}"]
    absent = {engine: ", ".join(lacking(engine)) for engine in PROGRAMS}
    return [*lines, *(f"NOT in {engine}, which lacks {names}" for engine, names in absent.items() if names)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needless = [item for item in items if _is_needless(getattr(item, "callspec", None))]
    config.hook.pytest_deselected(items=needless)
    items[:] = [item for item in items if item not in set(needless)]


def _is_needless(callspec: Any) -> bool:
    """Whether a test would say in a container what it has said in bubblewrap, or cannot be made there."""
    given = callspec.params if callspec else {}
    if given.get("room", "bubblewrap") == "bubblewrap":
        return False
    candidate, attack = given.get("candidate"), given.get("attack")
    if candidate is None or (attack is not None and attack.kind is not Kind.ANY):
        return True
    # Such options are bubblewrap's alone.
    return bool(candidate.exam.runtime_options)


@dataclass(frozen=True)
class ExamRoom:
    """A runtime, with what its sandboxes need to run the host's programs."""

    name: str
    options: dict[str, Any]
    tools: tuple[ToolDirectory, ...] = ()


@pytest.fixture(scope="session", params=["bubblewrap", *ENGINES])
def room(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExamRoom]:
    if request.param == "bubblewrap":
        yield ExamRoom("bubblewrap", {})
        return
    directory = tmp_path_factory.mktemp(request.param)
    archive = _image(directory / "image")
    with running(request.param, archive, "polar-exams:latest", directory) as engine:
        yield ExamRoom(engine.name, dict(engine.options), (USR,))


def _image(root: Path) -> Path:
    """An image that has nothing of its own: the host's programs are mounted into it, as in bubblewrap."""
    for name in ("usr", "etc/ssl", "tmp", "workspace", "home/agent", "opt", "var/tmp", "run", "proc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(Path("/", name)))
    for name in ETC:
        if Path("/etc", name).is_dir():
            shutil.copytree(Path("/etc", name), root / "etc" / name, symlinks=True)
        elif Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), root / "etc" / name)
    archive = root.with_suffix(".tar")
    with tarfile.open(archive, "w") as tar:
        tar.add(root, ".")
    return archive


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For programs that are put together here."""
    directory = tmp_path_factory.mktemp("tools")
    directory.chmod(0o755)
    return directory


@pytest.fixture
async def judges() -> AsyncIterator[dict[str, JudgeEndpoint]]:
    async with judging(read_as_told) as server:
        yield {"main": JudgeEndpoint(server.url, "judge")}
