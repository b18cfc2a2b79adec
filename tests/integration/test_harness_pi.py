"""The real Pi CLI, in both sandboxes, against a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath

import pytest

from polar.harnesses.base import HarnessContext
from polar.harnesses.pi import Pi
from polar.runtimes.base import ExecResult, Host, Runtime, Sandbox, SandboxSpec
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.runtimes.process import ProcessRuntime
from tests.fakes.chat_server import ChatServer, chat_server, tool_call

KEY = "session-secret"
DONE = {"content": "The file is written."}
RUNTIMES = [
    pytest.param(ProcessRuntime, id="process"),
    pytest.param(BubblewrapRuntime, id="bubblewrap", marks=pytest.mark.sandbox),
]


@asynccontextmanager
async def prepared(
    runtime: type[Runtime], pi: Pi, server: ChatServer, root: Path, instruction: str
) -> AsyncIterator[tuple[Sandbox, HarnessContext]]:
    """A sandbox with Pi configured in it."""
    installation = await pi.install()
    spec = SandboxSpec("s1", "127.0.0.1", server.port, installation.tools)
    sandbox = await runtime(runtime.Options()).start(spec, Host(root))
    context = HarnessContext(
        instruction=instruction,
        model="policy/small",
        gateway_url=sandbox.gateway_url,
        key=KEY,
        workspace=sandbox.workspace,
        home=sandbox.home,
        tmp=sandbox.tmp,
        max_context=8192,
        max_tokens=512,
        paths={tool.target: sandbox.tool_path(tool) for tool in installation.tools},
    )
    try:
        for path, data in pi.files(context).items():
            await sandbox.upload(path, data)
        yield sandbox, context
    finally:
        await sandbox.stop()


async def run(pi: Pi, sandbox: Sandbox, context: HarnessContext) -> ExecResult:
    return await sandbox.exec(pi.command(context), timeout=60, log_name="agent")


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_pi_uses_a_tool_and_answers(runtime: type[Runtime], tmp_path: Path) -> None:
    pi = Pi(Pi.Options())
    call = tool_call("bash", command="echo hello > greeting.txt")
    async with (
        chat_server(call, DONE) as server,
        prepared(runtime, pi, server, tmp_path / "s1", "Write a greeting.") as (sandbox, context),
    ):
        result = await run(pi, sandbox, context)
        assert result.exit_code == 0, result.stderr.text()
        assert await sandbox.download(PurePosixPath("greeting.txt")) == b"hello\n"
        assert result.stdout.text().strip() == DONE["content"]
    first, second = server.asked
    assert first.headers["Authorization"] == f"Bearer {KEY}"
    assert first.body["model"] == "policy/small"
    assert first.body["stream"] is True
    assert first.body["max_tokens"] == 512
    assert [message["role"] for message in first.body["messages"]] == ["system", "user"]
    assert "Write a greeting." in str(first.body["messages"][-1]["content"])
    assert sorted(tool["function"]["name"] for tool in first.body["tools"]) == [
        "bash",
        "edit",
        "read",
        "write",
    ]
    assert second.body["messages"][-1]["role"] == "tool"


async def test_options_reach_the_model_call(tmp_path: Path) -> None:
    pi = Pi(Pi.Options(tools=("bash",), system_prompt="You are terse.", append_system_prompt="Be brave."))
    async with (
        chat_server(DONE) as server,
        prepared(ProcessRuntime, pi, server, tmp_path / "s1", "Go.") as (sandbox, context),
    ):
        result = await run(pi, sandbox, context)
        assert result.exit_code == 0, result.stderr.text()
    (asked,) = server.asked
    assert [tool["function"]["name"] for tool in asked.body["tools"]] == ["bash"]
    system = str(asked.body["messages"][0]["content"])
    assert system.startswith("You are terse.")
    assert "Be brave." in system


@pytest.mark.parametrize(
    "instruction", ["--help me", "@nobody /model x", "x" * 300_000], ids=["dash", "at", "huge"]
)
async def test_any_instruction_arrives_as_it_is(instruction: str, tmp_path: Path) -> None:
    pi = Pi(Pi.Options(compaction=False))
    async with (
        chat_server(DONE) as server,
        prepared(ProcessRuntime, pi, server, tmp_path / "s1", instruction) as (sandbox, context),
    ):
        result = await run(pi, sandbox, context)
        assert result.exit_code == 0, result.stderr.text()
    content = server.asked[0].body["messages"][-1]["content"]
    assert (content if isinstance(content, str) else content[0]["text"]) == instruction
