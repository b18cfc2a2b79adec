"""The files that the guide prints for a harness of one's own make a package that rolls a session out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polar.models.session import SessionStatus

ROOT = Path(__file__).parents[2]
PRINTED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)

ROLL_OUT = """
import asyncio, sys
from pathlib import Path
from polar.tasksets.files import read_tasks
from tests.systems import system

async def main():
    (task,) = read_tasks(Path(sys.argv[1])).all_or_nothing()
    async with system(Path("data"), ["Paris."]) as running:
        await running.client.submit(task)
        async with running.node():
            (result,) = await running.client.wait([task.id], timeout=120)
    print(result.status, result.reward, result.stats.completions)

asyncio.run(main())
"""


def installed(directory: Path) -> Path:
    """The printed files, and the package that they make, in a directory of its own."""
    for name, content in PRINTED.findall((ROOT / "docs/guides/harness.md").read_text()):
        file = directory / "printed" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(directory / "site"), "."]
    subprocess.run(command, cwd=directory / "printed", check=True, capture_output=True)
    return directory / "site"


@pytest.mark.sandbox
def test_the_printed_harness_rolls_a_session_out(tmp_path: Path) -> None:
    site = installed(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, "-c", ROLL_OUT, str(tmp_path / "printed" / "task.yaml")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [SessionStatus.COMPLETED, "1.0", "1"], done.stderr
