"""A container engine's command line that does nothing but remember its orders and answer as it was told."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRAM = """#!{python} -IS
import json, sys, time
from pathlib import Path
directory = Path({directory!r})
with (directory / "orders.jsonl").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.loads((directory / "answers.json").read_text())
orders = " ".join(sys.argv[1:])
answer = next((answers[name] for name in answers if orders.startswith(name)), dict())
time.sleep(answer.get("seconds", 0))
sys.stdout.write(answer.get("stdout", ""))
sys.stderr.write(answer.get("stderr", ""))
sys.exit(answer.get("code", 0))
"""


@dataclass(frozen=True)
class FakeEngine:
    """The program lies in `directory`, which is to be the search path."""

    directory: Path

    def answer(self, **answers: Mapping[str, object]) -> None:
        """By the order's first words, underscores for spaces; what is not named succeeds in silence."""
        words = {name.replace("_", " "): answer for name, answer in answers.items()}
        (self.directory / "answers.json").write_text(json.dumps(words))

    @property
    def orders(self) -> list[list[str]]:
        file = self.directory / "orders.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def fake_engine(name: str, directory: Path) -> FakeEngine:
    program = directory / name
    program.write_text(PROGRAM.format(python=sys.executable, directory=str(directory)))
    program.chmod(0o755)
    engine = FakeEngine(directory)
    engine.answer()
    return engine
