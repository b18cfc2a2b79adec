"""What a harness's model does in this suite, and a node of it that can be killed in the middle of an answer.

python -m suites.branching.policy URL DIRECTORY HARNESS RUNTIME runs such a node for the server at a URL.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from polar.engines.base import GenerateRequest
from tests.fakes.scripted_engine import Answer, ScriptedEngine
from tests.rollouts import INSTRUCTION, MAX_CONTEXT
from tests.systems import RUNTIMES, worker
from tests.teaching import AGENTS, Teacher

COMMANDS = (
    "ls -la && date",
    "echo one > notes.txt && cat notes.txt",
    "echo hello > hello.txt",
    "cat hello.txt && ls -la",
)
FAILING = (*COMMANDS[:2], "echo hello > hello.txt; grep two notes.txt", COMMANDS[3])
"""The same, of which the third one fails although it does what it is for."""
OTHERWISE = "echo bye > hello.txt"
MIDDLE = 2
"""The turn before which a task's own branch leaves, and in which a node is killed."""
LAST_WORDS = 2
"""How many tokens of its last answer a node gives before it is killed."""


class Policy(Teacher):
    """Does a task in four commands; where a later one is asked for again, it spoils the task instead."""

    def __init__(self, engine: ScriptedEngine, harness: str, commands: Sequence[str] = COMMANDS) -> None:
        self._agent = AGENTS[harness]
        super().__init__(engine, self._agent, {INSTRUCTION: commands})
        self._later = {self._agent.shell(command) for command in commands[MIDDLE:]}
        self._said: set[str] = set()

    def answer(self, request: GenerateRequest) -> str:
        said = super().answer(request)
        is_again = said in self._later & self._said
        self._said.add(said)
        return self._agent.shell(OTHERWISE) if is_again and OTHERWISE not in self.prompt(request) else said

    def stuck(self) -> Answer:
        """The command of the turn in the middle, which is begun and never ends."""
        return Answer(self._agent.shell(COMMANDS[MIDDLE]), gate=asyncio.Event(), gate_at=LAST_WORDS)


async def work(url: str, directory: Path, harness: str, runtime: str) -> None:
    """Be a node that says when it has come to the middle of that turn."""
    async with worker(directory, url, [], max_context=MAX_CONTEXT) as parts:
        policy = Policy(parts.engine, harness)
        stuck = policy.stuck()

        def answer(request: GenerateRequest) -> str | Answer:
            said = policy.answer(request)
            return stuck if said == stuck.text else said

        parts.engine.script.append(answer)
        async with parts.node(name="first", runtimes=(*RUNTIMES, runtime)):
            await parts.engine.waiting.wait()
            print("in the middle", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    url, directory, harness, runtime = sys.argv[1:]
    asyncio.run(work(url, Path(directory), harness, runtime))
