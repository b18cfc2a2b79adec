"""The files an agent left in its workspace, carried into another sandbox; no `.git` comes along."""

from __future__ import annotations

from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.inside import UNLOCK, Spoiled, must_run, place_file, private_directory, run_script
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
find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {} +
tar -x -o -f "$1"
rm -f "$1"
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
        raise Spoiled(f"the workspace cannot be carried over: {error}") from error


async def _blame(context: EvaluationContext) -> None:
    """EvaluationFailed if the workspace was too large before the agent came."""
    async with context.fresh_sandbox() as fresh:
        size = await must_run(
            fresh, _SIZE, str(ARCHIVE_BYTES + 1), timeout=context.seconds_left, name="evaluator-size"
        )
        if int(size.stdout.read_text().strip() or 0) > ARCHIVE_BYTES:
            raise EvaluationFailed(
                f"the task's own workspace is larger than {ARCHIVE_BYTES} bytes",
                hint="evaluate it in the live sandbox",
            )


async def replace_workspace(sandbox: Sandbox, archive: bytes, *, timeout: float) -> None:
    """Make a sandbox's workspace what was packed, its own `.git` aside."""
    file = private_directory(sandbox) / "workspace.tar"
    await place_file(sandbox, file, archive)
    result = await run_script(sandbox, _REPLACE, str(file), timeout=timeout, name="evaluator-unpack")
    if result.exit_code != 0:
        raise Spoiled(f"the workspace cannot be unpacked: {result.stderr.read_text(errors='replace')[-500:]}")
