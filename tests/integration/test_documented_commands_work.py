"""The README and the quickstart guide, typed in as they stand: every block of commands works.

A comment above each block says what is done with it:
`<!-- test: run -->`, `<!-- test: start "WORDS" … -->` (in a terminal of its own, until one of the words
comes) or `<!-- test: skip, REASON -->`.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.fakes.tiny_llama import write_tiny_llama

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/quickstart.md")
BLOCK = re.compile(
    r"(?:<!-- test: (?P<mark>.*?) -->\n)?^```(?P<language>bash|sh|python)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
START_SECONDS = 120
MOST_SKIPPED = 3

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Block:
    mark: str
    language: str
    text: str

    @property
    def does(self) -> str:
        return self.mark.split(",")[0].split()[0]

    @property
    def reason(self) -> str:
        return self.mark.partition(",")[2].strip()

    @property
    def command(self) -> str:
        """Its first line, however the program is reached and whatever is said of it."""
        return self.text.splitlines()[0].partition("#")[0].strip().removeprefix(".venv/bin/")

    @property
    def argv(self) -> list[str]:
        return [".venv/bin/python", "-c", self.text] if self.language == "python" else shell(self.text)


def shell(text: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", text]


def blocks(document: str) -> list[Block]:
    found = BLOCK.finditer((ROOT / document).read_text())
    return [Block(match["mark"] or "", match["language"], match["text"]) for match in found]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As a clone after `make`, with this environment as its own, fewer sessions and a much smaller model."""
    directory = tmp_path / "clone"
    directory.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "docs"):
        (directory / name).symlink_to(ROOT / name)
    (directory / ".venv").symlink_to(sys.prefix)
    (directory / "tools").mkdir()
    (directory / "tools" / "environment.py").write_text("# The environment is the one that runs the tests.\n")
    quickstart = yaml.safe_load((ROOT / "examples" / "quickstart" / "tasks.yaml").read_text())
    quickstart["defaults"]["samples"] = 1
    quickstart["tasks"] = quickstart["tasks"][:2]
    (directory / "examples" / "quickstart").mkdir(parents=True)
    (directory / "examples" / "quickstart" / "tasks.yaml").write_text(yaml.safe_dump(quickstart))
    model = write_tiny_llama(directory / "model", max_position_embeddings=32768)
    training = yaml.safe_load((ROOT / "examples" / "grpo-pi" / "tiny.yaml").read_text())
    training |= {"steps": 1, "groups": 1}
    training["model"] |= {"name": str(model), "start": None}
    training["rollouts"] |= {"tasks": ["../quickstart/tasks.yaml"], "samples": 2}
    (directory / "examples" / "grpo-pi").mkdir()
    (directory / "examples" / "grpo-pi" / "tiny.yaml").write_text(yaml.safe_dump(training))
    # Any free port: another server may be on this machine.
    engine = {"model": str(model), "device": "cpu", "threads": 1}
    settings = {"server": {"port": 0}, "engine": engine}
    small = yaml.safe_load((ROOT / "examples" / "grpo-pi" / "small-system.yaml").read_text())
    small["engine"] |= engine
    (directory / "examples" / "grpo-pi" / "small-system.yaml").write_text(yaml.safe_dump(small))
    (directory / "polar.yaml").write_text(yaml.safe_dump(settings))
    return directory


def environment() -> dict[str, str]:
    """This one, without what would lead commands to another server, or what this `make` was told."""
    foreign = ("POLAR_", "MAKE", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    if cache := os.environ.get("POLAR_CACHE"):
        kept["POLAR_CACHE"] = cache
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"  # as after `source .venv/bin/activate`
    return {**kept, "PATH": path, "PYTHON": sys.executable, "COLUMNS": "160", "ARGS": ""}


@contextmanager
def terminal(block: Block, clone: Path) -> Iterator[None]:
    """A command that stays, from the words that say it is ready until Ctrl-C."""
    words = re.findall(r'"([^"]+)"', block.mark)
    # `exec`, so that the signal meets the command itself.
    process = subprocess.Popen(
        shell(f"exec {block.text}"),
        cwd=clone,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said = read_until(process, words)
        assert any(word in said for word in words), said
        yield
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode in (0, 130)
    finally:
        process.kill()
        process.wait()


def read_until(process: subprocess.Popen[bytes], words: list[str]) -> str:
    said, deadline = "", time.monotonic() + START_SECONDS
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline and selector.select(deadline - time.monotonic()):
            piece = os.read(process.stdout.fileno(), 65536).decode()
            said += piece
            if not piece or any(word in said for word in words):
                break
    return said


def test_a_newcomer_can_type_in_every_block_of_commands(clone: Path) -> None:
    """The README, then the guide, with what the README has started still running."""
    running = set()
    with ExitStack() as terminals:
        for block in (block for document in DOCUMENTS for block in blocks(document)):
            if block.does == "start" and block.command not in running:
                terminals.enter_context(terminal(block, clone))
                running.add(block.command)
            elif block.does == "run":
                run(block, clone)


def run(block: Block, clone: Path) -> None:
    done = subprocess.run(
        block.argv,
        cwd=clone,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_block_is_left_out_without_a_reason(document: str) -> None:
    found = blocks(document)
    unmarked = [block.text for block in found if not re.match(r"(run|start|skip)\b", block.mark)]
    assert not unmarked
    skipped = [block for block in found if block.does == "skip"]
    assert all(block.reason for block in skipped)
    assert len(skipped) <= MOST_SKIPPED < len(found)
