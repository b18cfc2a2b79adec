"""What exams need besides a sandbox: a pytest that the sandbox sees, and a judge."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from importlib.metadata import distribution
from pathlib import PurePosixPath

import pytest

from polar.evaluators.base import JudgeEndpoint
from polar.runtimes.base import ToolDirectory
from suites.attacks.exams import RUNNER, read_as_told
from tests.fakes.judge_server import judging

PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging")


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ToolDirectory:
    directory = tmp_path_factory.mktemp("runner")
    directory.chmod(0o755)
    for name in PACKAGES:
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                target = directory / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)
    return ToolDirectory(directory, PurePosixPath(RUNNER))


@pytest.fixture
async def judges() -> AsyncIterator[dict[str, JudgeEndpoint]]:
    async with judging(read_as_told) as server:
        yield {"main": JudgeEndpoint(server.url, "judge")}
