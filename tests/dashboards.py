"""A real small run to look at: server, node, sandboxes and agents; only the model plays a script."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from polar.config.settings import DEFAULT_MODEL
from polar.engines.base import GenerateRequest
from polar.models.access import TokenRole
from polar.models.task import Run, RunKind, TaskSpec
from polar.models.views import RunStep
from polar.node.node import join
from tests.fakes.scripted_engine import Answer
from tests.rollouts import scripted_call
from tests.systems import System, system

T = TypeVar("T")

WIDE, NARROW = 1280, 390
"""Widths of a laptop's window and of a telephone."""

TRAINING = Run(name="grpo-small", kind=RunKind.TRAINING)

HOSTILE = """<script>window.owned = 1</script><img src=x onerror="window.owned = 1"><b>bold</b>"""
"""What an agent may write to get at whoever reads it."""

AGENT = """
import json, os, re, sys, urllib.request

def tool(name, about):
    function = {"name": name, "description": about, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}

TOOLS = [tool("bash", "Run a command."), tool("write", "Write a file.")]

def ask(messages, tools=TOOLS):
    body = {"model": os.environ["POLAR_MODEL"], "messages": messages}
    if tools:
        body["tools"] = tools
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json",
         "x-stainless-retry-count": "0"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def went_on(history, answer, result):
    call = answer["tool_calls"][0]
    return [*history, answer, {"role": "tool", "tool_call_id": call["id"], "content": result}]

instruction = os.environ["POLAR_INSTRUCTION"]
main = [{"role": "system", "content": "You repair small programs. " + "Work carefully. " * 30},
        {"role": "user", "content": instruction}]
first = ask(main)
after = went_on(main, first, "app.py  test_app.py  README.md")
second = ask(after)
ask([{"role": "user", "content": "A short title for: " + instruction}], tools=None)
helper = ask([{"role": "system", "content": "You look things up for another agent."},
              {"role": "user", "content": "What does app.py return?"}])
again = ask([*after[:-1], {**after[-1], "content": "app.py  (listed anew)"}])
sample = int(re.search(r"\\.(\\d+)[.@]\\d+(/|$)", os.getcwd()).group(1))
last = ask(went_on(after, second, os.environ["HOSTILE"] + (" and it works" if sample % 2 == 0 else "")))
print("the agent is done", file=sys.stderr)
if "fixed" in (last.get("content") or ""):
    open("answer.txt", "w").write(last["content"])
"""


class Model:
    """Answers by what it is asked, so that agents that run at once do not mix up their scripts."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    def __call__(self, request: GenerateRequest, text: str) -> str | Answer:
        if "wait for me" in text:
            return Answer("I have waited.", gate=self.gate)
        if "pause at the end" in text and "onerror" in text:
            return Answer("I have waited, and it is fixed.", gate=self.gate)
        if "A short title" in text:
            return "Repairing app.py"
        if "look things up" in text:
            return "app.py returns the sum of its arguments, and fails for none."
        if "onerror" in text:
            return f"{HOSTILE} is fixed." if "it works" in text else "I could not repair it, I am sorry."
        if "listed anew" in text:
            return scripted_call("bash", command="cat README.md")
        if "test_app.py" in text:
            return "The test names the fault.\n" + scripted_call("bash", command="sed -n 1,20p app.py")
        return "I look at the files first.\n" + scripted_call("bash", command="ls")


@dataclass
class Fleet:
    """The run, in a thread of its own; the calling thread drives the browser."""

    url: str
    reader: str
    """A token that reads."""
    loop: asyncio.AbstractEventLoop
    running: System
    model: Model
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def do(self, work: Coroutine[Any, Any, T], timeout: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def roll_out(self, task: TaskSpec) -> None:
        """Run a task to its end."""

        async def work() -> None:
            await self.running.client.submit(task)
            await self.running.client.wait([task.id], timeout=60)

        self.do(work())

    def branch_out(self) -> None:
        """Run a sample with four branches, one of these again until it asks something else, and a replay."""
        strategy = {"name": "calls", "options": {"calls": [1, -1]}}
        self.roll_out(repair_task("repair-tree", samples=1, branching={"at": strategy, "samples": 2}))
        client = self.running.client
        self.do(client.branch("repair-tree.2", calls=6))
        replay = self.do(client.replay("repair-tree.1"))
        self.do(client.wait(["repair-tree", replay.task_id], timeout=60))

    def train(self) -> None:
        """Report two trainings, one of which has learned from the first group in its last step."""
        *others, last = steps(1.0)
        self.report(TRAINING, [*others, last.model_copy(update={"tasks": ("repair-app",)})])
        self.report(Run(name="grpo-slow", kind=RunKind.TRAINING), steps(0.5))

    def report(self, run: Run, steps: list[RunStep]) -> None:
        """Report the steps of a training."""
        self.do(self.running.client.begin_run(run))
        self.do(self.running.client.report_steps(run.name, steps))

    def answer_the_waiting(self) -> None:
        self.loop.call_soon_threadsafe(self.model.gate.set)


def repair_task(id: str, samples: int, **changes: Any) -> TaskSpec:
    document = {
        "id": id,
        "instruction": "app.py fails when it is called without arguments. Repair it.",
        "harness": {
            "name": "shell",
            "options": {"command": [sys.executable, "agent.py"], "env": {"HOSTILE": HOSTILE}},
        },
        "runtime": "process",
        "evaluator": {"name": "command", "options": {"command": "test -s answer.txt"}},
        "files": {"agent.py": {"text": AGENT}, "app.py": {"text": "print(sum(map(int, ())))\n"}},
        "artifacts": ["*.txt"],
        "samples": samples,
    }
    return TaskSpec.model_validate({**document, **changes})


def waiting_task(id: str) -> TaskSpec:
    """A task whose session runs until the model is let go on."""
    return repair_task(id, 1, instruction="wait for me")


@contextmanager
def fleet(data_dir: Path) -> Iterator[Fleet]:
    """The run, already with a group that was rolled out under two policy versions."""
    ready: asyncio.Future[Fleet]
    loop = asyncio.new_event_loop()
    ready = loop.create_future()
    thread = threading.Thread(target=lambda: loop.run_until_complete(_serve(data_dir, ready)), daemon=True)
    thread.start()

    async def wait() -> Fleet:
        return await ready

    made = asyncio.run_coroutine_threadsafe(wait(), loop).result(60)
    try:
        made.roll_out(repair_task("repair-app", samples=4, run=TRAINING))
        made.do(made.running.client.update_policy())
        made.roll_out(repair_task("repair-again", samples=2, run=TRAINING))
        made.train()
        made.branch_out()
        yield made
    finally:
        loop.call_soon_threadsafe(made.stopped.set)
        thread.join(30)
        assert not thread.is_alive()
        loop.close()


async def _serve(data_dir: Path, ready: asyncio.Future[Fleet]) -> None:
    try:
        await _run(data_dir, ready)
    except BaseException as error:
        if not ready.done():
            ready.set_exception(error)
        raise


async def _run(data_dir: Path, ready: asyncio.Future[Fleet]) -> None:
    model = Model()
    entry: list[Any] = []
    async with system(data_dir, entry, model=DEFAULT_MODEL, max_context=32_768) as running:
        decode = running.engine.tokenizer.decode

        def answer(request: GenerateRequest) -> str | Answer:
            return model(request, decode(list(map(int, request.prompt_ids)), skip_special_tokens=False))

        running.engine.script.append(answer)
        reader = running.server.issue("dashboard", TokenRole.READ_ONLY)
        await join(running.client, running.node_settings)
        async with running.node():
            made = Fleet(running.server.url, reader, asyncio.get_running_loop(), running, model)
            ready.set_result(made)
            await made.stopped.wait()


def steps(speed: float) -> list[RunStep]:
    """Numbers of a training, and whether it gets better fast."""
    return [RunStep(step=step, numbers=_numbers(step, speed)) for step in range(1, 61)]


def _numbers(step: int, speed: float) -> dict[str, float]:
    share = speed * step / 60
    numbers = {
        "reward": 0.2 + 0.6 * share + 0.05 * ((7 * step) % 5 - 2) / 2,
        "loss": 0.8 - 0.5 * share,
        "entropy": 1.2 - 0.4 * share,
        # Of a run without a penalty.
        "kl": 0.0,
        "clip_fraction": 0.1 * share,
    }
    return {**numbers, "held_out_success": 0.3 + 0.4 * share} if step % 10 == 0 else numbers
