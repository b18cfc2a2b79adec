"""How the shell harness hands over the instruction and the gateway."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.harnesses.base import HarnessContext, provider_environment
from polar.harnesses.shell import Shell
from polar.models.component import Component
from polar.runtimes.base import Host, SandboxSpec
from polar.runtimes.process import ProcessRuntime
from tests.fakes.harness_context import harness_context


def context(instruction: str, home: PurePosixPath = PurePosixPath("/home/agent")) -> HarnessContext:
    return harness_context({}, instruction=instruction, home=home)


async def run(shell: Shell, instruction: str, root: Path) -> str:
    spec = SandboxSpec("s", "127.0.0.1", 9)
    sandbox = await ProcessRuntime(ProcessRuntime.Options()).start(spec, Host(root))
    try:
        given = context(instruction, sandbox.home)
        for path, data in shell.files(given).items():
            await sandbox.upload(path, data)
        result = await sandbox.exec(shell.command(given), timeout=20, log_name="agent")
        assert result.exit_code == 0, result.stderr.text()
        return result.stdout.read().decode()
    finally:
        await sandbox.stop()


@pytest.mark.parametrize(
    "reading",
    ['cat "$POLAR_INSTRUCTION_FILE"', "cat", 'printf "%s" "$POLAR_INSTRUCTION"'],
    ids=["file", "stdin", "env"],
)
@pytest.mark.parametrize("instruction", ["-n Schreib 'grüße' $HOME\t`x`", "\n-n a\r\n\n$HOME `x`\n\n"])
async def test_instruction_arrives(reading: str, instruction: str, tmp_path: Path) -> None:
    assert await run(Shell(Shell.Options(command=reading)), instruction, tmp_path / "s") == instruction


def test_instruction_of_several_lines_is_none_of_the_variables() -> None:
    """Container engines refuse those, and the session with them."""
    command = Shell(Shell.Options(command=["agent", "a b"])).command(context("one\ntwo\n"))
    assert not any("\n" in value for value in command.env.values())
    assert command.argv[-2:] == ("agent", "a b")


async def test_huge_instruction_still_arrives_as_file_and_stdin(tmp_path: Path) -> None:
    instruction = "x" * 500_000
    shell = Shell(
        Shell.Options(command='cat "$POLAR_INSTRUCTION_FILE" - | wc -c; echo "${POLAR_INSTRUCTION-unset}"')
    )
    assert (await run(shell, instruction, tmp_path / "s")).split() == ["1000000", "unset"]


def test_gateway_is_given_to_every_sdk_and_to_others() -> None:
    env = (
        Shell(Shell.Options(command=["agent", "--go"], env={"A": "b", "POLAR_KEY": "x"}))
        .command(context("i"))
        .env
    )
    told = provider_environment("http://127.0.0.1:1234", "secret", "small")
    assert told["OPENAI_BASE_URL"] == "http://127.0.0.1:1234/v1"
    assert told["POLAR_KEY"] == "secret"
    assert env == told | {
        "A": "b",
        "POLAR_INSTRUCTION_FILE": "/home/agent/.polar/instruction.txt",
        "POLAR_INSTRUCTION": "i",
        "POLAR_TOOLS_FILE": "/home/agent/.polar/tools.json",
    }


def test_list_is_run_as_it_is_and_string_by_the_shell() -> None:
    assert Shell(Shell.Options(command=["agent", "a b"])).command(context("i")).argv == ("agent", "a b")
    assert Shell(Shell.Options(command="a | b")).command(context("i")).argv == ("/bin/sh", "-c", "a | b")


@pytest.mark.parametrize(
    ("options", "field"), [({}, "command"), ({"command": []}, "command"), ({"cmd": "x"}, "cmd")]
)
def test_bad_options_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"harness\.options\.{field}"):
        plugins.create("harnesses", "harness", Component(name="shell", options=options))
