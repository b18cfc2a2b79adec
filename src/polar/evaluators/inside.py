"""Running scripts and graders inside a sandbox, and reporting their output."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from polar.errors import PolarError
from polar.evaluators.base import EvaluationFailed
from polar.models.task import FileContent
from polar.runtimes.base import Command, ExecResult, PathRefused, Sandbox, SandboxError

REPORT_BYTES = 16 * 1024
"""Maximum bytes from the end of stdout, and of stderr, in a report."""
REPORT_LIMIT = 60 * 1024
"""Maximum size of a whole report in bytes; up to 64 KiB are stored."""
SHARE_OF_TIME = 0.9
"""Fraction of the remaining budget that a grader may use, so that its result can still be reported."""
ANY_PLUGIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
"""For graders that rely on their image's plug-ins without naming them; a workspace brings none."""
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
"""Keeps git from using configuration and hooks that others may have left."""
SCRIPTS = {file.name: file.read_text() for file in (Path(__file__).parent / "scripts").iterdir()}
"""The scripts that evaluators run in sandboxes, read before the first agent starts."""


class UngradableWorkspace(PolarError):
    """The agent left its work in a state that cannot be evaluated; it gets the lowest reward."""


def text_of(result: ExecResult) -> str:
    """Return everything it wrote, stderr after stdout, since their interleaving is not recorded."""
    return f"{result.stdout.text()}\n{result.stderr.text()}"


def report_of(result: ExecResult) -> str:
    streams = (("stdout", result.stdout), ("stderr", result.stderr))
    texts = ((name, output.text(REPORT_BYTES).rstrip()) for name, output in streams)
    return "\n".join(
        [f"exit code {result.exit_code}", *(f"--- {name}\n{text}" for name, text in texts if text)]
    )


def truncate(text: str, limit: int = REPORT_LIMIT) -> str:
    """Shorten a text to about `limit` bytes, saying how much is missing; the result is always valid text."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return f"{data[:limit].decode(errors='ignore')}\n[{len(data) - limit} more bytes]"


def private_directory(sandbox: Sandbox) -> PurePosixPath:
    """Return an unguessable path in the sandbox's temporary directory."""
    return sandbox.tmp / f"polar-{secrets.token_hex(8)}"


async def run_script(
    sandbox: Sandbox,
    name: str,
    *arguments: str,
    timeout: float,
    env: Mapping[str, str] = {},
    stdin: bytes = b"",
    must_succeed: bool = False,
) -> ExecResult:
    """Run one of our scripts in the workspace; raise EvaluationFailed if that is not possible in time."""
    command = Command(("/bin/sh", "-c", SCRIPTS[f"{name}.sh"], "sh", *arguments), env=env, stdin=stdin)
    try:
        result = await sandbox.exec(command, timeout=timeout, log_name=f"evaluator-{name}")
    except SandboxError as error:
        raise EvaluationFailed(f"evaluator-{name}: cannot run: {error}") from error
    if result.timed_out:
        raise EvaluationFailed(
            f"evaluator-{name}: timed out after {timeout:g} s", hint="raise budgets.evaluate_seconds"
        )
    if must_succeed and result.exit_code != 0:
        raise EvaluationFailed(f"evaluator-{name}: failed in the sandbox: {report_of(result)[-2000:]}")
    return result


async def place(
    sandbox: Sandbox, files: Mapping[str, FileContent], base: PurePosixPath | None = None
) -> None:
    """Write the evaluator's files over whatever is there, or raise UngradableWorkspace."""
    root = base or sandbox.workspace
    for name, file in files.items():
        await place_file(sandbox, root / name, file.data, executable=file.executable)


async def place_file(sandbox: Sandbox, path: PurePosixPath, data: bytes, *, executable: bool = False) -> None:
    try:
        await sandbox.upload(path, data, executable=executable)
    except PathRefused as error:
        # Only the agent can have put a link or a directory there, which must not save it from its score.
        raise UngradableWorkspace(f"cannot write the evaluator's files: {error}") from error
    except SandboxError as error:
        raise EvaluationFailed(f"cannot write the evaluator's files: {error}") from error


async def run_grader(
    command: str | Sequence[str],
    sandbox: Sandbox,
    *,
    env: Mapping[str, str],
    timeout: float,
    stdin: bytes = b"",
) -> ExecResult:
    """Run an evaluator's command: a string with a copy of `/bin/sh`, a list directly.

    Nothing in its environment comes from the agent: its home is empty, and runners load only what they are
    told to. `env` takes precedence.
    """
    clean = private_directory(sandbox)
    await place_file(sandbox, clean / "home" / ".keep", b"")
    await place_file(sandbox, clean / "python" / "sitecustomize.py", SCRIPTS["sitecustomize"].encode())
    environment = {
        **CLEAN_GIT,
        "HOME": str(clean / "home"),
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Compiled files beside the sources may belong to other sources.
        "PYTHONPYCACHEPREFIX": str(clean / "pycache"),
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **env,
        "PYTHONPATH": ":".join(filter(None, (str(clean / "python"), env.get("PYTHONPATH")))),
    }
    if isinstance(command, str):
        shell = str(clean / "sh")
        await run_script(sandbox, "closed-shell", shell, timeout=timeout, must_succeed=True)
        command = (shell, "-c", command)
    try:
        return await sandbox.exec(
            Command(tuple(command), env=environment, stdin=stdin), timeout=timeout, log_name="evaluator"
        )
    except SandboxError as error:
        raise EvaluationFailed(f"the evaluator's command cannot run: {error}") from error
