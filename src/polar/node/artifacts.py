"""What is kept of a session for people to look at: logs, the diff, declared files, as one zip archive."""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import zipfile
from pathlib import Path, PurePosixPath

from polar.gateway.session import without_keys
from polar.models.task import TaskSpec
from polar.runtimes.base import Command, Output, Sandbox, SandboxError

log = logging.getLogger(__name__)

_LIST_SECONDS = 30.0
_LIST_BYTES = 4 * 1024 * 1024
_BASELINE_BYTES = 8 * 1024 * 1024
_DIFF = """
mkdir -p "$1"
if test -d .git && command -v git > /dev/null; then
    # With its time: git compares it with those of files to see which may have changed.
    cp -p .git/index "$1.index"
    export GIT_INDEX_FILE="$1.index" GIT_OPTIONAL_LOCKS=0
    git add --all --intent-to-add . && git diff --no-ext-diff --no-textconv HEAD
else
    diff -ruN "$1" .
fi | head -c 4194304
rm -rf "$1" "$1.index"
"""


class Artifacts:
    """An archive in the making, up to a limit; what no longer fits is named instead of kept.

    The files themselves lie on the disk until `write`, which takes long, puts them into the archive.
    """

    def __init__(self, limit: int, directory: Path) -> None:
        """`directory` is where data is put that is not a file yet."""
        self.left = limit
        self.problems: list[str] = []
        """What could not be collected at all, and why."""
        self._directory = directory
        self._files: list[tuple[str, Path, int]] = []
        """What each is called, where it is, and how much of its end is kept."""
        self._omitted: list[str] = []

    def add(self, name: str, data: bytes) -> None:
        if len(data) > self.left:
            self.omit(name, f"{len(data)} bytes, over the limit of node.artifact_bytes")
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / str(len(self._files))
        path.write_bytes(data)
        self._add_file(name, path, len(data))

    def _add_file(self, name: str, path: Path, size: int) -> None:
        self.left -= size
        self._files.append((_spelt(name), path, size))

    def omit(self, name: str, why: str) -> None:
        self._omitted.append(_spelt(f"{name}: {why}\n"))

    def fail(self, name: str, error: Exception) -> None:
        """Something could not be collected: a matter for the result, not for the session's verdict."""
        log.warning("artifact %s could not be collected", name, exc_info=error)
        self.problems.append(without_keys(_spelt(f"artifact {name}: {error}")))
        self.omit(name, without_keys(str(error)))

    def add_directory(self, directory: Path, prefix: str) -> None:
        """Every regular file of a host directory; of one that is too long, its end."""
        for path in sorted(directory.rglob("*")) if directory.is_dir() else ():
            if path.is_file() and not path.is_symlink():
                name = f"{prefix}/{path.relative_to(directory).as_posix()}"
                self._add_file(name, path, min(path.stat().st_size, self.left))

    def write(self, path: Path) -> bool:
        """Write the archive, without any session key; False if there is nothing in it."""
        if not self._files and not self._omitted:
            return False
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, file, size in self._files:
                archive.writestr(name, without_keys(Output(file).tail(size)))
            if self._omitted:
                archive.writestr("omitted.txt", "".join(self._omitted).encode())
        return True


async def collect(artifacts: Artifacts, sandbox: Sandbox, task: TaskSpec) -> None:
    """Add the diff and the files that the task names. An agent may have left anything in their way, which
    costs no session its verdict: what cannot be had is named instead."""
    for name, add in (("final.diff", _add_diff), ("files", _add_files)):
        try:
            await add(artifacts, sandbox, task)
        except Exception as error:
            artifacts.fail(name, error)


async def _add_diff(artifacts: Artifacts, sandbox: Sandbox, task: TaskSpec) -> None:
    """Add what the agent changed, for people to read: against its repository, or the files it was given.

    Made with the agent's own sandbox and repository, so it is no evidence; evaluators make their own.
    """
    before = sandbox.tmp / "polar-before"
    if sum(len(content.data) for content in task.files.values()) > _BASELINE_BYTES:
        artifacts.omit("final.diff", "the task's files are too large to be compared")
        return
    for path, content in task.files.items():
        await sandbox.upload(before / path, content.data, executable=content.executable)
    command = Command(("/bin/sh", "-c", _DIFF, "diff", str(before)))
    result = await sandbox.exec(command, timeout=_LIST_SECONDS, log_name="diff")
    changed = await asyncio.to_thread(result.stdout.read)
    if changed:
        await asyncio.to_thread(artifacts.add, "final.diff", changed)
    for output in (result.stdout, result.stderr):
        output.remove()


async def _add_files(artifacts: Artifacts, sandbox: Sandbox, task: TaskSpec) -> None:
    """Add the workspace files that the task's globs name; a file that cannot be had is named as such."""
    for path in await _matching(sandbox, task.artifacts) if task.artifacts else ():
        try:
            data = await sandbox.download(sandbox.workspace / path, max_bytes=max(artifacts.left, 1))
        except SandboxError as error:
            artifacts.omit(f"files/{path}", str(error))
        else:
            await asyncio.to_thread(artifacts.add, f"files/{path}", data)


async def _matching(sandbox: Sandbox, globs: tuple[str, ...]) -> list[PurePosixPath]:
    listing = await sandbox.exec(
        Command(("/bin/sh", "-c", "find . -type f | sort")), timeout=_LIST_SECONDS, log_name="artifacts"
    )
    text = await asyncio.to_thread(listing.stdout.tail, _LIST_BYTES)
    paths = (PurePosixPath(line) for line in text.decode("utf-8", "surrogateescape").splitlines())
    return [path for path in paths if any(fnmatch.fnmatchcase(str(path), glob) for glob in globs)]


def _spelt(name: str) -> str:
    """A file's name as text: an agent may give it any bytes, and those that are no text are spelt out."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
