"""The environment that everything which grades is run in: nothing in it is the agent's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from polar.evaluators.base import EvaluationFailed
from polar.evaluators.inside import CLEAN_GIT, place, private_directory
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


async def run_grader(
    command: str | Sequence[str],
    sandbox: Sandbox,
    *,
    env: Mapping[str, str],
    timeout: float,
    stdin: bytes = b"",
) -> ExecResult:
    """Run a command of the evaluator's; a string by `/bin/sh -c`, a list as it is."""
    argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
    environment = await _environment(sandbox, env)
    try:
        return await sandbox.exec(
            Command(argv, env=environment, stdin=stdin), timeout=timeout, log_name=LOG_NAME
        )
    except SandboxError as error:
        raise EvaluationFailed(f"the evaluator's command could not be run: {error}") from error


async def _environment(sandbox: Sandbox, env: Mapping[str, str]) -> dict[str, str]:
    """An empty home, and settings by which runners load what they are told to alone; `env` wins."""
    clean = private_directory(sandbox)
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
