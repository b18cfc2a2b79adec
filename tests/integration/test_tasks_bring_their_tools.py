"""A task's own tools are offered to the model and called by every harness that takes them."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from polar.assets.node import node
from polar.config import plugins
from polar.harnesses import preset
from polar.harnesses.gemini_cli import PACKAGE as GEMINI
from polar.models.component import Component
from polar.models.session import AgentEnd, SessionStatus
from tests.fakes import tool_server
from tests.rollouts import Rollout, roll_out, scripted_call

SECRET = 'it\'s $HOME "${PATH}" !true {env:HOME} 42'
"""Nothing may expand it on its way to the server."""
TOKEN = "a-token"

OFFERED_AS = {
    "acp": "mcp_words_look_up",
    "claude_code": "mcp__words__look_up",
    "codex": "look_up",
    "continue_cli": "look_up",
    "copilot": "words-look_up",
    "gemini_cli": "mcp_words_look_up",
    "opencode": "words_look_up",
    "pi": "mcp__words__look_up",
    "qwen_code": "mcp__words__look_up",
}
"""How the model is offered the tool by each harness that asks it by itself."""
TRIED = [name for name in OFFERED_AS if name not in preset.names()]
"""The others are tried by `make test-agents`."""


async def options(name: str) -> dict[str, Any]:
    if name != "acp":
        return {}
    harness = plugins.create("harnesses", "harness", Component(name="gemini_cli"))
    root = (await harness.install()).tools[-1].source
    program = Path(root) / "node_modules" / GEMINI / "bundle" / "gemini.js"
    return {
        "command": [str(node() / "bin" / "node"), str(program), "--acp", "--skip-trust", "--model", "small"],
        "auth": "gemini-api-key",
        "env": {"GEMINI_CLI_NO_RELAUNCH": "true"},
    }


def told(rollout: Rollout, name: str) -> str:
    """What the tool said, as the model was told in its second prompt."""
    result = rollout.result
    assert (result.status, result.agent_end) == (SessionStatus.COMPLETED, AgentEnd.EXITED), result
    first, second = rollout.recording.completions
    assert OFFERED_AS[name] in {tool.name for tool in first.tools}
    assert second.parent == first.id
    said = second.messages[-1]
    assert said.role == "tool", said
    return said.content


@pytest.mark.parametrize("name", TRIED)
async def test_a_command_s_tool_is_called(tmp_path: Path, name: str) -> None:
    tools = {"words": {"command": "python3", "args": ["server.py"], "env": {"SECRET": SECRET}}}
    rollout = await roll_out(
        tmp_path / "data",
        name,
        [scripted_call(OFFERED_AS[name], word="polar"), "Done."],
        runtime="process" if name == "acp" else "bubblewrap",
        options=await options(name),
        files={"server.py": {"text": Path(tool_server.__file__).read_text()}},
        tools=tools,
    )
    assert tool_server.found("polar", SECRET, "/") in said_plainly(told(rollout, name))


def said_plainly(text: str) -> str:
    """Some harnesses hand a tool's answer on as JSON within their text."""
    return text.replace('\\"', '"')


@pytest.mark.parametrize("name", ["acp", "pi"])
async def test_a_server_s_tool_is_called(tmp_path: Path, name: str) -> None:
    await assert_server_is_asked(tmp_path / "data", name)


async def assert_server_is_asked(data_dir: Path, name: str) -> None:
    """Have a harness call a tool of a server that its sandbox reaches by the allow list alone."""
    with tool_server.tool_server(TOKEN) as port:
        address, headers = f"localhost:{port}", {"Authorization": f"Bearer {TOKEN}"}
        rollout = await roll_out(
            data_dir,
            name,
            [scripted_call(OFFERED_AS[name], word="polar"), "Done."],
            runtime="process" if name == "acp" else closed(address),
            options=await options(name),
            tools={"words": {"url": f"http://{address}/mcp", "headers": headers}},
            network_allow=(address,),
        )
    assert f"polar is {TOKEN} in" in told(rollout, name)


def closed(address: str) -> dict[str, Any]:
    return {"name": "bubblewrap", "options": {"network": {"allow": [address]}}}


OFFICIAL = """
import asyncio, json, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main(*server):
    started = StdioServerParameters(command=server[0], args=server[1:], env={"SECRET": "s"})
    async with stdio_client(started) as ends:
        async with ClientSession(*ends) as session:
            await session.initialize()
            (tool,) = (await session.list_tools()).tools
            answer = await session.call_tool(tool.name, {"word": "polar"})
            print(json.dumps([tool.name, answer.content[0].text]))

asyncio.run(main(*sys.argv[1:]))
"""


async def test_the_server_of_these_tests_is_one_to_the_official_client() -> None:
    """The protocol's own package comes with mini-swe-agent."""
    harness = plugins.create("harnesses", "harness", Component(name="mini_swe_agent"))
    packages = (await harness.install()).tools[-1].source
    script = f"import site; site.addsitedir({str(packages)!r})\n{OFFICIAL}"
    command = (sys.executable, "-c", script, sys.executable, tool_server.__file__)
    asked = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    said, wrong = await asked.communicate()
    assert asked.returncode == 0, wrong.decode()
    assert json.loads(said) == ["look_up", tool_server.found("polar", "s", str(Path.cwd()))]
