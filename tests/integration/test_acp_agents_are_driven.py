"""Harness `acp`: agents of several makers, driven unmodified by the Agent Client Protocol."""

from __future__ import annotations

import json
from pathlib import Path

from polar.assets.node import node
from polar.config import plugins
from polar.harnesses.gemini_cli import PACKAGE as GEMINI
from polar.models.component import Component
from tests.rollouts import assert_rolled_out, roll_out, scripted_call

WRITE = "echo hello > hello.txt"
NODE = node() / "bin" / "node"
OPENCODE = {
    "enabled_providers": ["polar"],
    "model": "polar/small",
    "agent": {"title": {"disable": True}},
    "provider": {
        "polar": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:POLAR_GATEWAY_URL}/v1", "apiKey": "{env:POLAR_KEY}"},
            "models": {"small": {"limit": {"context": 100_000, "output": 4096}}},
        }
    },
}


async def installed(name: str) -> Path:
    harness = plugins.create("harnesses", "harness", Component(name=name))
    return Path((await harness.install()).tools[-1].source)


async def test_gemini_cli_is_driven(tmp_path: Path) -> None:
    program = await installed("gemini_cli") / "node_modules" / GEMINI / "bundle" / "gemini.js"
    options = {
        "command": [str(NODE), str(program), "--acp", "--skip-trust", "--model", "small"],
        "auth": "gemini-api-key",
        "env": {"GEMINI_CLI_NO_RELAUNCH": "true"},
    }
    script = [scripted_call("run_shell_command", command=WRITE, description="Write hello"), "Done."]
    rollout = await roll_out(tmp_path / "data", "acp", script, options=options)
    assert_rolled_out(rollout)
    assert {one.dialect for one in rollout.recording.completions} == {"google_generate"}


async def test_opencode_is_driven(tmp_path: Path) -> None:
    program = await installed("opencode") / "bin" / "opencode"
    command = f"echo '{json.dumps(OPENCODE)}' > $HOME/oc.json; OPENCODE_CONFIG=$HOME/oc.json {program} acp"
    options = {"command": command, "env": {"OPENCODE_DISABLE_MODELS_FETCH": "1"}}
    script = [scripted_call("bash", command=WRITE, description="Write hello"), "Done."]
    assert_rolled_out(await roll_out(tmp_path / "data", "acp", script, options=options))
