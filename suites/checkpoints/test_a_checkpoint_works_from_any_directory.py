"""`polar serve --model DIRECTORY` and `--engine-url`: tokens mode, and a loop of tools by OpenAI's SDK."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

import polar
from polar.models.chat import Message
from polar.models.session import SessionResult, SessionStatus
from polar.recordings import recording
from polar.rendering.families import renderer_for
from tests.systems import shell_task
from tests.waiting import eventually_sync

pytestmark = pytest.mark.timeout(1800)

START_SECONDS = 300
SESSION_SECONDS = 900
AGENT = f"""{sys.executable} - <<'PY'
import json, os
from openai import OpenAI
PATH = {{"type": "object", "properties": {{"path": {{"type": "string"}}}}, "required": ["path"]}}
FUNCTION = {{"name": "read_file", "description": "Reads a text file.", "parameters": PATH}}
READ = {{"type": "function", "function": FUNCTION}}
messages = [{{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}}]
with OpenAI(max_retries=0, timeout=600) as client:
    # The first turn must call: whether the model would is not what is tested here.
    for choice in ({{"type": "function", "function": {{"name": "read_file"}}}}, "auto"):
        answer = client.chat.completions.create(
            model=os.environ["POLAR_MODEL"], messages=messages, tools=[READ], tool_choice=choice,
            parallel_tool_calls=False, max_tokens=96,
        ).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or ():
            path = json.loads(call.function.arguments)["path"]
            said = "The number is 4711." if path.endswith("secret.txt") else "There is no such file."
            messages.append({{"role": "tool", "tool_call_id": call.id, "content": said}})
json.dump(messages, open("answer.txt", "w"))
PY
"""
NATURAL = AGENT.replace('{"type": "function", "function": {"name": "read_file"}}, "auto"', '"auto", "auto"')
"""The same agent, whose model calls by itself or not."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def command(directory: Path, *arguments: str) -> Iterator[None]:
    """A command of Polar, once it says that it serves."""
    written = directory / f"{arguments[0]}.log"
    with written.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "polar", *arguments], cwd=directory, stdout=log, stderr=log, text=True
        )
        try:
            _wait(process, written)
            yield
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[str], log: Path) -> None:
    def is_up() -> bool:
        assert process.poll() is None, f"it did not start: {log.read_text()[-2000:]}"
        return re.search("^(serving|ready) ", log.read_text(), re.MULTILINE) is not None

    eventually_sync(is_up, START_SECONDS)


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[polar.Client]:
    port = free_port()
    with command(directory, "serve", "--port", str(port), *arguments):
        token = (directory / ".polar" / "token").read_text().strip()
        with polar.Client(f"http://127.0.0.1:{port}", token) as client:
            yield client


def settings(directory: Path, tool_form: str | None) -> None:
    engine = {"max_context": 4096, "slots": 2, "start_seconds": START_SECONDS, "tool_form": tool_form}
    engine = {name: value for name, value in engine.items() if value is not None}
    (directory / "polar.yaml").write_text(
        yaml.safe_dump({"engine": engine, "node": {"runtimes": ["process"]}})
    )


def rolled_out(client: polar.Client, id: str, agent: str) -> tuple[SessionResult, list[Message]]:
    """The session's result, and what the model said in it."""
    spec = shell_task(
        id,
        agent,
        instruction="Read the file secret.txt with the tool, then tell me the number that is in it.",
        budgets={"run_seconds": SESSION_SECONDS},
    )
    client.submit(spec)
    [result] = client.wait([id], timeout=SESSION_SECONDS)
    kept = recording.decode(client.recording(result.session_id))
    said = [one.response for one in kept.completions]
    for turn in said:
        print(repr(turn.content), [(call.name, call.arguments) for call in turn.tool_calls])
    print(f"{result.stats.trainable_tokens} of {result.stats.sampled_tokens} tokens trainable")
    return result, said


def check(result: SessionResult) -> None:
    """Every sampled token is trainable, in one trace, and was rendered by the model's own template."""
    assert (result.status, result.renderer) == (SessionStatus.COMPLETED, "template")
    assert result.logprobs_mode == "processed_logprobs"
    assert (result.stats.completions, result.stats.traces) == (2, 1)
    assert result.stats.trainable_tokens == result.stats.sampled_tokens > 0


def test_the_renderer_is_its_own_template(checkpoint: Path) -> None:
    renderer = renderer_for(str(checkpoint), checkpoint)
    assert renderer.name == "template"
    assert renderer.call_form is not None
    print(f"calls: {renderer.call_form}")


@contextmanager
def engine(directory: Path, checkpoint: Path) -> Iterator[str]:
    port = free_port()
    with command(
        directory, "engine", "--model", str(checkpoint), "--port", str(port), "--max-context", "4096"
    ):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("way", ["--model", "--engine-url"])
def test_a_loop_of_tools_is_one_exact_trace(
    checkpoint: Path, engine_url: str | None, tmp_path: Path, way: str
) -> None:
    settings(tmp_path, None)
    with ExitStack() as parts:
        named = str(checkpoint)
        if way == "--engine-url":
            named = engine_url or parts.enter_context(engine(tmp_path, checkpoint))
        client = parts.enter_context(serving(tmp_path, way, named))
        result, turns = rolled_out(client, "loop", AGENT)
    check(result)
    assert [call.name for call in turns[0].tool_calls] == ["read_file"]


def test_it_calls_by_itself_in_the_form_that_is_named(
    checkpoint: Path, tool_form: str | None, tmp_path: Path
) -> None:
    if tool_form is None:
        pytest.skip("POLAR_CHECKPOINT_TOOL_FORM names no form")
    settings(tmp_path, tool_form)
    with serving(tmp_path, "--model", str(checkpoint)) as client:
        result, turns = rolled_out(client, "natural", NATURAL)
    check(result)
    assert turns[0].tool_calls
