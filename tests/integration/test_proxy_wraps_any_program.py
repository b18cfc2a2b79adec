"""`polar proxy`: a program that knows nothing of Polar runs against the gateway, and its tokens are kept."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.config.settings import EngineSettings
from polar.engines.embedded.model import load
from polar.engines.embedded.server import EmbeddedServer
from polar.harnesses.codex import Codex
from polar.harnesses.opencode import OpenCode
from polar.models.completion import Completion
from polar.recordings import recording
from tests.fakes.character_chat import Said
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.vllm_wire import vllm_wire
from tests.vercel import tool_loop

ASK = """
import openai, os, sys
answer = openai.OpenAI().chat.completions.create(
    model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "hi"}]
)
sys.exit(answer.usage.completion_tokens)
"""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    directory = write_tiny_llama(tmp_path / "tiny")
    async with EmbeddedServer(load(EngineSettings(model=str(directory), device="cpu"))) as server:
        yield server


async def proxy(engine: EmbeddedServer, out: Path, *command: str) -> asyncio.subprocess.Process:
    return await started("--engine", engine.url, "--model", engine.model.name, "--out", str(out), *command)


async def started(*arguments: str, stdin: int | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polar", "proxy", *arguments),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("model", ['os.environ["OPENAI_MODEL"]', '"gpt-4o"'], ids=["told", "built in"])
async def test_a_program_s_tokens_are_kept_and_its_exit_code_is_passed_on(
    engine: EmbeddedServer, tmp_path: Path, model: str
) -> None:
    program = ASK.replace("MODEL", model, 1)
    process = await proxy(engine, tmp_path / "out", "--", sys.executable, "-c", program)
    _, told = await process.communicate()
    kept = recording.decode((tmp_path / "out" / "recording").read_bytes())
    (completion,) = kept.completions
    assert process.returncode == len(completion.sampled_ids) > 0, told.decode()
    assert kept.result.stats.trainable_tokens == len(completion.sampled_ids)
    assert f"polar show {tmp_path / 'out' / 'recording'}" in told.decode()


async def test_without_a_program_it_serves_and_says_what_to_set(
    engine: EmbeddedServer, tmp_path: Path
) -> None:
    process = await proxy(engine, tmp_path / "out")
    assert process.stdout is not None
    lines = [(await process.stdout.readline()).decode() for _ in range(3)]
    assert lines[0].startswith("export OPENAI_BASE_URL=http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130


async def test_a_program_that_is_not_there_is_one_line(engine: EmbeddedServer, tmp_path: Path) -> None:
    process = await proxy(engine, tmp_path / "out", "--", "no-such-program")
    _, told = await process.communicate()
    assert (process.returncode, told.decode()) == (1, "error: no-such-program: no such program\n")
    assert not (tmp_path / "out").exists()


ASK_PLAINLY = """
import json, os, urllib.request
asked = json.dumps({"model": "small", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(urllib.request.urlopen(urllib.request.Request(url, asked, headers)).status, flush=True)
"""


async def test_a_program_that_cannot_be_started_is_one_line(tmp_path: Path) -> None:
    """As one of an environment that was moved, whose Python is no longer where it says."""
    program = tmp_path / "my-agent"
    program.write_text("#!/no/such/python\n")
    program.chmod(0o755)
    async with vllm_wire(Said("Hello.")) as wire:
        engine = ("--engine", wire.url, "--engine-kind", "openai", "--model", "small")
        process = await started(*engine, "--out", str(tmp_path / "out"), "--", str(program))
        _, told = await process.communicate()
    assert process.returncode == 1
    assert told.decode().endswith(f"error: {program}: cannot be started: No such file or directory\n")


async def test_two_at_once_never_share_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with vllm_wire(*[Said("Hello.")] * 20) as wire:
        engine = ("--engine", wire.url, "--engine-kind", "openai", "--model", "small")
        ask = ("--", sys.executable, "-c", ASK_PLAINLY)
        both = [await started(*engine, *ask) for _ in range(2)]
        for process in both:
            await process.communicate()
        stays = ("--", sys.executable, "-c", ASK_PLAINLY + "input()")
        first = await started(*engine, "--out", "out", *stays, stdin=asyncio.subprocess.PIPE)
        assert first.stdout is not None
        assert await first.stdout.readline() == b"200\n"
        second = await started(*engine, "--out", "out", *ask)
        _, refused = await second.communicate()
        await first.communicate(b"\n")
    assert [process.returncode for process in (*both, first, second)] == [0, 0, 0, 1]
    assert b"error: out/capture.log: another `polar proxy` writes it" in refused
    kept = [*tmp_path.glob(".polar/proxy/*/recording"), tmp_path / "out" / "recording"]
    assert [len(recording.decode(path.read_bytes()).completions) for path in kept] == [1, 1, 1]


async def test_nothing_is_left_where_nothing_was_recorded(engine: EmbeddedServer, tmp_path: Path) -> None:
    quiet = await proxy(engine, tmp_path / "out", "--", "true")
    await quiet.communicate()
    assert (quiet.returncode, (tmp_path / "out").exists()) == (0, False)
    failed = await started("--engine", "http://127.0.0.1:1", "--out", str(tmp_path / "out"), "--", "true")
    _, told = await failed.communicate()
    assert (failed.returncode, (tmp_path / "out").exists()) == (1, False)
    assert "127.0.0.1:1 cannot be reached" in told.decode()
    assert "(is it running, and is this its address?)" in told.decode()


async def recorded(out: Path, *command: str, says: Said) -> Completion:
    """The first model call of a real program around which an engine answers in text."""
    async with vllm_wire(says) as wire:
        wire.context = 65_536
        engine = ("--engine", wire.url, "--engine-kind", "openai", "--model", "small")
        process = await started(*engine, "--out", str(out), "--", *command)
        shown, told = await process.communicate()
    assert process.returncode == 0, (shown + told).decode()
    return recording.decode((out / "recording").read_bytes()).completions[0]


async def test_codex_without_any_settings_asks_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "codex").mkdir()
    own = 'model = "gpt-5.5"\nmodel_provider = "elsewhere"\n[analytics]\nenabled = false\n'
    (tmp_path / "codex" / "config.toml").write_text(own)
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "codex"))
    installed = await Codex(Codex.Options()).install()
    codex = installed.tools[0].source / "bin" / "codex"
    run = (str(codex), "exec", "--skip-git-repo-check", "-C", str(tmp_path), "Say hello.")
    completion = await recorded(tmp_path / "out", *run, says=Said("Hello."))
    assert completion.dialect == "openai_responses"
    assert completion.messages[-1].content.endswith("Say hello.")
    assert (tmp_path / "codex" / "config.toml").read_text() == own


def installed(directory: Path, name: str, *program: str) -> str:
    """Put a program where it is called by its name."""
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n')
    path.chmod(0o755)
    return str(path)


async def test_opencode_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (await OpenCode(OpenCode.Options()).install()).tools[0].source / "bin" / "opencode"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command = installed(tmp_path, "opencode", str(program))
    completion = await recorded(tmp_path / "out", command, "run", "Say hello.", says=Said("Hello."))
    assert completion.dialect == "openai_chat"


async def test_vercels_anthropic_provider_asks_the_gateway(tmp_path: Path) -> None:
    command = await tool_loop("anthropic", "claude-sonnet-5", "whole")
    completion = await recorded(tmp_path / "out", *command, says=Said("Rain."))
    assert (completion.dialect, completion.tools[0].name) == ("anthropic_messages", "weather")


async def test_a_program_that_asks_nothing_is_told_why_that_may_be(
    engine: EmbeddedServer, tmp_path: Path
) -> None:
    quiet = await proxy(engine, tmp_path / "out", "--", "true")
    _, told = await quiet.communicate()
    assert "no model call was recorded: the program may take its base URL" in told.decode()
    assert "known by the name of their command: aider, cn, copilot" in told.decode()
    shown = await proxy(engine, tmp_path / "out", "--", sys.executable, "-c", "import os; print(*os.environ)")
    names, _ = await shown.communicate()
    assert {"GOOGLE_GENERATIVE_AI_API_KEY", "CODEX_API_KEY", "CODEX_HOME"} <= set(names.decode().split())
