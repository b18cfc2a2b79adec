"""The environment that everything which grades is run in: nothing in it is the agent's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from polar.evaluators.base import EvaluationFailed
from polar.evaluators.inside import CLEAN_GIT, must_run, place, private_directory
from polar.models.task import FileContent
from polar.runtimes.base import Command, ExecResult, Sandbox, SandboxError

LOG_NAME = "evaluator"
SHARE_OF_TIME = 0.9
"""How much of what is left of the budget a grader may take, so that its end can still be told."""
ANY_PLUGIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
"""For graders that count on the plug-ins of their images and name none; a workspace brings none."""

_SITE = '''\
"""Puts the directory that Python searches first behind its library, which it can then not replace."""

import os
import sys


def _first():
    words = iter(sys.orig_argv[1:])
    for word in words:
        if not word.startswith("-"):
            return os.path.dirname(os.path.realpath(word))
        if word in ("-W", "-X"):
            next(words, None)
        elif word == "-" or (word[-1] in "mc" and word[1] != "-"):
            break
    return os.getcwd()


if getattr(sys.flags, "safe_path", False):
    _installed = [number for number, path in enumerate(sys.path) if path.endswith("-packages")]
    sys.path.insert(_installed[0] if _installed else len(sys.path), _first())
'''

_CLOSED_SHELL = 'mkdir -p "${1%/*}" && cp /bin/sh "$1" && chmod 0111 "$1" && "$1" -c true'
"""Makes a shell into whose memory nobody looks: the kernel closes that of programs run from files that
their user may not read. Else a program of the agent's that the shell starts could trace its parent."""


async def run_grader(
    command: str | Sequence[str],
    sandbox: Sandbox,
    *,
    env: Mapping[str, str],
    timeout: float,
    stdin: bytes = b"",
) -> ExecResult:
    """Run a command of the evaluator's; a string by a copy of `/bin/sh`, a list as it is."""
    clean = private_directory(sandbox)
    environment = await _environment(sandbox, clean, env)
    if isinstance(command, str):
        shell = str(clean / "sh")
        await must_run(sandbox, _CLOSED_SHELL, shell, timeout=timeout, name="evaluator-shell")
        command = (shell, "-c", command)
    argv = tuple(command)
    try:
        return await sandbox.exec(
            Command(argv, env=environment, stdin=stdin), timeout=timeout, log_name=LOG_NAME
        )
    except SandboxError as error:
        raise EvaluationFailed(f"the evaluator's command could not be run: {error}") from error


async def _environment(sandbox: Sandbox, clean: PurePosixPath, env: Mapping[str, str]) -> dict[str, str]:
    """An empty home, and settings by which runners load what they are told to alone; `env` wins."""
    files = {"home/.keep": FileContent(text=""), "python/sitecustomize.py": FileContent(text=_SITE)}
    await place(sandbox, files, clean)
    return {
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
        "PYTHONPATH": _python_path(clean, env),
    }


def _python_path(clean: PurePosixPath, env: Mapping[str, str]) -> str:
    return ":".join(filter(None, (str(clean / "python"), env.get("PYTHONPATH"))))
