"""Small scripts that an evaluator runs inside a sandbox, and whose fault it is when they fail."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import PurePosixPath

from polar.errors import PolarError
from polar.evaluators.base import EvaluationFailed
from polar.evaluators.output import report_of
from polar.models.task import FileContent
from polar.runtimes.base import Command, ExecResult, PathRefused, Sandbox, SandboxError


class UngradableWorkspace(PolarError):
    """What the agent left cannot be evaluated, and that is the agent's doing: its reward is 0."""


CLEAN_GIT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.hooksPath",
    "GIT_CONFIG_VALUE_0": "/dev/null",
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
    "GIT_TERMINAL_PROMPT": "0",
}
"""For git where somebody else's configuration and hooks may lie about."""


UNLOCK = 'chmod -R u+rwX . 2>/dev/null; chmod u+rwx "$TMPDIR" "$HOME" 2>/dev/null'
"""For scripts that look at what an agent left: it may have locked directories, to hide or to stay."""


def private_directory(sandbox: Sandbox) -> PurePosixPath:
    """A path in the sandbox's temporary directory that nobody can have guessed."""
    return sandbox.tmp / f"polar-{secrets.token_hex(8)}"


async def run_script(
    sandbox: Sandbox,
    script: str,
    *arguments: str,
    timeout: float,
    name: str,
    env: Mapping[str, str] = {},
    stdin: bytes = b"",
) -> ExecResult:
    """Run a shell script of ours in the workspace; EvaluationFailed if it cannot be run or takes too long."""
    command = Command(("/bin/sh", "-c", script, "sh", *arguments), env=env, stdin=stdin)
    try:
        result = await sandbox.exec(command, timeout=timeout, log_name=name)
    except SandboxError as error:
        raise EvaluationFailed(f"{name}: could not be run: {error}") from error
    if result.timed_out:
        raise EvaluationFailed(
            f"{name}: did not end within {timeout:g} s", hint="raise budgets.evaluate_seconds"
        )
    return result


async def must_run(
    sandbox: Sandbox,
    script: str,
    *arguments: str,
    timeout: float,
    name: str,
    env: Mapping[str, str] = {},
    stdin: bytes = b"",
) -> ExecResult:
    """As `run_script`, where every exit code but 0 is a failed evaluation."""
    result = await run_script(sandbox, script, *arguments, timeout=timeout, name=name, env=env, stdin=stdin)
    if result.exit_code != 0:
        raise EvaluationFailed(f"{name}: failed in the sandbox: {report_of(result)[-2000:]}")
    return result


async def place(
    sandbox: Sandbox, files: Mapping[str, FileContent], base: PurePosixPath | None = None
) -> None:
    """Put the evaluator's files over whatever is there, or raise UngradableWorkspace."""
    root = base or sandbox.workspace
    for name, file in files.items():
        await place_file(sandbox, root / name, file.data, executable=file.executable)


async def place_file(sandbox: Sandbox, path: PurePosixPath, data: bytes, *, executable: bool = False) -> None:
    try:
        await sandbox.upload(path, data, executable=executable)
    except PathRefused as error:
        # Only the agent can have put a link or a directory there, and must not escape its score by it.
        raise UngradableWorkspace(f"the evaluator's files could not be put in place: {error}") from error
    except SandboxError as error:
        raise EvaluationFailed(f"the evaluator's files could not be put in place: {error}") from error
