"""Any command as a harness, given the instruction as file, on stdin and in the environment."""

from __future__ import annotations

from pathlib import PurePosixPath

from pydantic import Field

from polar.harnesses.base import (
    Harness,
    HarnessContext,
    Installation,
    json_file,
    mcp_servers,
    provider_environment,
)
from polar.runtimes.base import Command

INSTRUCTION = ".polar/instruction.txt"
TOOLS = ".polar/tools.json"
LONGEST_VARIABLE = 120 * 1024
"""The kernel refuses environment variables of 128 KiB or more, including the name."""
_EXPORT = """
POLAR_INSTRUCTION=$(cat "$POLAR_INSTRUCTION_FILE" && printf .)
export POLAR_INSTRUCTION="${POLAR_INSTRUCTION%.}"
exec "$@"
"""
"""Sets the variable inside, since container engines drop multi-line ones; the dot keeps a final newline."""


class Shell(Harness):
    """Runs `command` in the workspace.

    The instruction is in the file `$POLAR_INSTRUCTION_FILE`, on stdin, and, unless it is too long for the
    environment, in `$POLAR_INSTRUCTION`. Base URL, key and model are set for every provider's API, as
    `polar proxy` does, and also as `POLAR_GATEWAY_URL`, `POLAR_KEY` and `POLAR_MODEL`. The session's model
    answers under any model name. The task's tools are in the file `$POLAR_TOOLS_FILE`, as `mcpServers`.
    """

    asks_by_any_name = True
    takes_tools = True

    class Options(Harness.Options):
        command: str | list[str] = Field(min_length=1)
        """The command; a string is run with `/bin/sh -c`, a list directly."""
        env: dict[str, str] = Field(default_factory=dict)
        """Additional environment variables; Polar's own take precedence."""

    options: Options

    async def install(self) -> Installation:
        return Installation(version=None)

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        return {
            context.home / INSTRUCTION: context.instruction.encode(),
            context.home / TOOLS: json_file({"mcpServers": mcp_servers(context)}),
        }

    def command(self, context: HarnessContext) -> Command:
        command = self.options.command
        argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        env = {
            **self.options.env,
            **provider_environment(context.gateway_url, context.key, context.model),
            "POLAR_INSTRUCTION_FILE": str(context.home / INSTRUCTION),
            "POLAR_TOOLS_FILE": str(context.home / TOOLS),
        }
        if len(context.instruction.encode()) < LONGEST_VARIABLE and "\0" not in context.instruction:
            if {"\n", "\r"} & set(context.instruction):
                argv = ("/bin/sh", "-c", _EXPORT, "sh", *argv)
            else:
                env["POLAR_INSTRUCTION"] = context.instruction
        return Command(argv, env, stdin=context.instruction.encode())
