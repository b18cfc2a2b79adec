"""`polar proxy` points agents at the gateway by the names of their commands, as their users call them."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath

import pytest

from polar.harnesses.mini_swe_agent import PROGRAM, MiniSweAgent
from polar.harnesses.preset import LAUNCH, PresetHarness, preset
from tests.fakes.character_chat import Said
from tests.integration import test_harness_conformance as conformance
from tests.integration import test_proxy_wraps_any_program as proxy

pytestmark = pytest.mark.timeout(600)

ASKED = {
    "aider": ("--yes-always", "--no-git", "--no-check-update", "--message", "Say hello."),
    "continue_cli": ("--print", "Say hello."),
    "copilot": ("--allow-all-tools", "--prompt", "Say hello."),
    "kilo": ("run", "Say hello."),
    "gptme": ("--non-interactive", "Say hello."),
}
"""What a user types after the name."""


@pytest.mark.parametrize("name", ASKED)
async def test_a_user_s_own_agent_asks_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    harness = conformance.harness(name)
    installation = await harness.install()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    paths = {tool.target: PurePosixPath(tool.source) for tool in installation.tools}
    assert isinstance(harness, PresetHarness)
    program = harness.program(conformance.context("", paths=paths))
    command = proxy.installed(tmp_path, preset(name).command, *program)
    completion = await proxy.recorded(tmp_path / "out", command, *ASKED[name], says=Said("Hello."))
    assert completion.dialect == preset(name).dialect
    assert any("Say hello." in message.content for message in completion.messages)


async def test_mini_swe_agent_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installation = await MiniSweAgent(MiniSweAgent.Options()).install()
    packages = installation.tools[-1].source
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # Whoever uses it has answered its first questions.
    monkeypatch.setenv("MSWEA_CONFIGURED", "true")
    command = proxy.installed(
        tmp_path, "mini", sys.executable, "-I", "-S", "-c", LAUNCH, str(packages), PROGRAM
    )
    asked = ("--task", "Say hello.", "--yolo", "--exit-immediately", "--cost-limit", "0")
    completion = await proxy.recorded(tmp_path / "out", command, *asked, says=Said("Hello."))
    assert any("Say hello." in message.content for message in completion.messages)
