"""What an evaluator runs inside a sandbox: small scripts and graders, and what is made of their output."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from polar.errors import PolarError
from polar.evaluators.base import EvaluationFailed
from polar.models.task import FileContent
from polar.runtimes.base import Command, ExecResult, PathRefused, Sandbox, SandboxError

REPORT_BYTES = 16 * 1024
"""How much of the end of stdout, and of stderr, goes into a report."""
REPORT_LIMIT = 60 * 1024
"""How many bytes a whole report may have; 64 KiB are kept of it."""
SHARE_OF_TIME = 0.9
"""How much of what is left of the budget a grader may take, so that its end can still be told."""
ANY_PLUGIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
"""For graders that count on the plug-ins of their images and name none; a workspace brings none."""
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
SCRIPTS = {file.name: file.read_text() for file in (Path(__file__).parent / "scripts").iterdir()}
"""What evaluators run in sandboxes themselves; as it was before the first agent came."""


class UngradableWorkspace(PolarError):
    """What the agent left cannot be evaluated, and that is the agent's doing: its reward is 0."""


def text_of(result: ExecResult) -> str:
    """Everything it wrote; stderr after stdout, since how they were interleaved is not kept."""
    return f"{result.stdout.text()}\n{result.stderr.text()}"


def report_of(result: ExecResult) -> str:
    """Exit code, and the end of both streams."""
    streams = (("stdout", result.stdout), ("stderr", result.stderr))
    texts = ((name, output.text(REPORT_BYTES).rstrip()) for name, output in streams)
    return "\n".join(
        [f"exit code {result.exit_code}", *(f"--- {name}\n{text}" for name, text in texts if text)]
    )


def cut(text: str, limit: int = REPORT_LIMIT) -> str:
    """A text of about `limit` bytes at most that says how much is missing; valid whatever is in it."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return f"{data[:limit].decode(errors='ignore')}\n[{len(data) - limit} more bytes]"


def private_directory(sandbox: Sandbox) -> PurePosixPath:
    """A path in the sandbox's temporary directory that nobody can have guessed."""
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
    """Run one of our scripts in the workspace; EvaluationFailed if it cannot be run or takes too long,
    and, if it must succeed, for every exit code but 0."""
    command = Command(("/bin/sh", "-c", SCRIPTS[f"{name}.sh"], "sh", *arguments), env=env, stdin=stdin)
    try:
        result = await sandbox.exec(command, timeout=timeout, log_name=f"evaluator-{name}")
    except SandboxError as error:
        raise EvaluationFailed(f"evaluator-{name}: could not be run: {error}") from error
    if result.timed_out:
        raise EvaluationFailed(
            f"evaluator-{name}: did not end within {timeout:g} s", hint="raise budgets.evaluate_seconds"
        )
    if must_succeed and result.exit_code != 0:
        raise EvaluationFailed(f"evaluator-{name}: failed in the sandbox: {report_of(result)[-2000:]}")
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


async def run_grader(
    command: str | Sequence[str],
    sandbox: Sandbox,
    *,
    env: Mapping[str, str],
    timeout: float,
    stdin: bytes = b"",
) -> ExecResult:
    """Run a command of the evaluator's; a string by a copy of `/bin/sh`, a list as it is.

    Nothing in its environment is the agent's: its home is empty, and runners load what they are told to
    alone; `env` wins.
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
        # Compiled files that lie beside the sources may be of other sources.
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
        raise EvaluationFailed(f"the evaluator's command could not be run: {error}") from error
