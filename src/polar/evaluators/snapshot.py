"""The files an agent left in its workspace, carried into another sandbox as far as the task allows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.inside import (
    UNLOCK,
    UngradableWorkspace,
    must_run,
    place_file,
    private_directory,
    run_script,
)
from polar.evaluators.steering import INSTALLED
from polar.runtimes.base import Sandbox, SandboxError

ARCHIVE_BYTES = 256 * 1024 * 1024
"""How large a workspace may be to be carried."""

_PACK = f"""
{UNLOCK}
mkdir -p "$1" && tar -c -f - --exclude=.git . 2>/dev/null | head -c "$2" > "$1/workspace.tar"
"""
_SIZE = "tar -c -f - --exclude=.git . 2>/dev/null | head -c $1 | wc -c"
_REPLACE = """
set -e
mine=$1; shift
mkdir "$mine/after"
tar -x -o -f "$mine/workspace.tar" -C "$mine/after"
rm "$mine/workspace.tar"
"""
_EVERYTHING = """
find . -path ./.git -prune -o -type d \\( "$@" \\) -prune -o ! -type d -exec rm -f {} +
find . -mindepth 1 -depth -type d ! -path ./.git ! -path './.git/*' -exec rmdir {} + 2>/dev/null || true
cd "$mine/after"
find . -type d \\( "$@" \\) -prune -exec rm -rf {} +
"""
_SOME = """
find . -path ./.git -prune -o ! -type d \\( "$@" \\) -exec rm -f {} +
cd "$mine/after"
find . ! -type d ! \\( "$@" \\) -exec rm -f {} +
"""
_LAY_OUT = """
cp -a "$mine/after/." "$OLDPWD/"
rm -rf "$mine"
"""


async def pack(context: EvaluationContext) -> bytes:
    """The agent's workspace as a tar archive."""
    directory = private_directory(context.sandbox)
    arguments = (str(directory), str(ARCHIVE_BYTES + 1))
    await must_run(context.sandbox, _PACK, *arguments, timeout=context.seconds_left, name="evaluator-pack")
    try:
        return await context.sandbox.download(directory / "workspace.tar", max_bytes=ARCHIVE_BYTES)
    except SandboxError as error:
        await _blame(context)
        raise UngradableWorkspace(f"the workspace cannot be carried over: {error}") from error


async def _blame(context: EvaluationContext) -> None:
    """EvaluationFailed if the workspace was too large before the agent came."""
    async with context.fresh_sandbox() as fresh:
        size = await must_run(
            fresh, _SIZE, str(ARCHIVE_BYTES + 1), timeout=context.seconds_left, name="evaluator-size"
        )
        if int(size.stdout.text().strip() or 0) > ARCHIVE_BYTES:
            raise EvaluationFailed(
                f"the task's own workspace is larger than {ARCHIVE_BYTES} bytes",
                hint="evaluate it in the live sandbox",
            )


async def replace_workspace(
    sandbox: Sandbox, archive: bytes, allow: Sequence[str], *, timeout: float
) -> None:
    """Make a sandbox's workspace what was packed, as far as `allow` goes; what is installed stays its own."""
    mine = private_directory(sandbox)
    await place_file(sandbox, mine / "workspace.tar", archive)
    script, tests = (_EVERYTHING, _kept(allow)) if "*" in allow else (_SOME, _allowed(allow))
    words = [word for test in tests for word in ("-o", *test)][1:]
    result = await run_script(
        sandbox, _REPLACE + script + _LAY_OUT, str(mine), *words, timeout=timeout, name="evaluator-unpack"
    )
    if result.exit_code != 0:
        raise UngradableWorkspace(f"the workspace cannot be unpacked: {result.stderr.text(500)}")


def _kept(allow: Sequence[str]) -> list[tuple[str, str]]:
    """The directories of which the sandbox keeps its own: the installed ones that `allow` does not name."""
    named = {part for pattern in allow for part in PurePosixPath(pattern).parts}
    return [("-name", name) for name in INSTALLED if name not in named]


def _allowed(allow: Sequence[str]) -> list[tuple[str, str]]:
    return [("-path", f"./{pattern.removeprefix('./')}") for pattern in allow]
