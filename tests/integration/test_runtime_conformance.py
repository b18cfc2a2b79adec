"""What every runtime promises, checked on each with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil
import pytest

from polar.runtimes.base import Command, Mount, PathRefused, Runtime, Sandbox, SandboxError, SandboxSpec
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.runtimes.process import ProcessRuntime

RUNTIMES = {"process": ProcessRuntime, "bubblewrap": BubblewrapRuntime}


@pytest.fixture(params=["process", pytest.param("bubblewrap", marks=pytest.mark.sandbox)])
def runtime(request: pytest.FixtureRequest) -> type[Runtime]:
    return RUNTIMES[request.param]


@pytest.fixture
async def sandbox(runtime: type[Runtime], tmp_path: Path) -> AsyncIterator[Sandbox]:
    started = await runtime(runtime.Options()).start(spec(tmp_path / "s1"))
    yield started
    await started.stop()


@pytest.fixture
def token() -> str:
    """A number of seconds that no other process sleeps."""
    return f"{1_000_000 + secrets.randbelow(10**9)}"


def spec(root: Path, *mounts: Mount) -> SandboxSpec:
    return SandboxSpec(root.name, root, "127.0.0.1", 9, mounts)


def sh(script: str, **fields: object) -> Command:
    return Command(("/bin/sh", "-c", script), **fields)  # type: ignore[arg-type]


async def output(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(sh(script), timeout=20, log_name="test")
    assert result.exit_code == 0, result.stderr.read_text()
    return result.stdout.read_text()


def sleepers(token: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if token in process.cmdline()[1:2]:
                found.append(process.pid)
    return found


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the state is that of other processes
            await asyncio.sleep(0.01)


async def test_runtime_works_on_this_machine(runtime: type[Runtime]) -> None:
    assert await runtime.unavailable() is None


@pytest.mark.parametrize(
    ("script", "code"),
    [("true", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -15 $$", -15), ("no-such-thing", 127)],
)
async def test_exit_code_and_signal_are_told(sandbox: Sandbox, script: str, code: int) -> None:
    result = await sandbox.exec(sh(script), timeout=20, log_name="test")
    assert (result.exit_code, result.timed_out) == (code, False)


async def test_missing_program_is_an_exit_code_and_says_so(sandbox: Sandbox) -> None:
    result = await sandbox.exec(Command(("/no/such/program",)), timeout=20, log_name="test")
    assert result.exit_code != 0
    assert "/no/such/program" in result.stderr.read_text()


async def test_stdin_is_given_then_closed(sandbox: Sandbox) -> None:
    given = b"line\n" * 100_000
    result = await sandbox.exec(Command(("cat",), stdin=given), timeout=20, log_name="test")
    assert result.stdout.read_bytes() == given


async def test_environment_is_not_inherited(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "open sesame")
    names = {line.partition("=")[0] for line in (await output(sandbox, "env")).splitlines()}
    assert names - {"PWD", "POLAR_SANDBOX"} == {"PATH", "LANG", "USER", "LOGNAME", "SHELL", "HOME", "TMPDIR"}


async def test_command_adds_to_the_environment(sandbox: Sandbox) -> None:
    command = sh('printf %s "$LANG $WORD"', env={"WORD": "ä = b", "LANG": "C"})
    result = await sandbox.exec(command, timeout=20, log_name="test")
    assert result.stdout.read_text() == "C ä = b"


async def test_work_begins_in_the_workspace_or_where_asked(sandbox: Sandbox) -> None:
    assert await output(sandbox, "pwd") == f"{sandbox.workspace}\n"
    result = await sandbox.exec(sh("pwd", cwd=sandbox.home), timeout=20, log_name="test")
    assert result.stdout.read_text() == f"{sandbox.home}\n"


async def test_directories_are_private_writable_and_kept_between_commands(sandbox: Sandbox) -> None:
    await output(sandbox, 'touch a "$HOME/b" "$TMPDIR/c"')
    assert (await output(sandbox, 'ls . "$HOME" "$TMPDIR"')).split()[1::2] == ["a", "b", "c"]


async def test_mounts_are_found_inside(runtime: type[Runtime], tmp_path: Path) -> None:
    source = tmp_path / "tool"
    source.mkdir()
    (source / "data").write_text("42")
    mount = Mount(source, PurePosixPath("/opt/polar/tool"))
    sandbox = await runtime(runtime.Options()).start(spec(tmp_path / "s1", mount))
    assert await output(sandbox, f"cat {sandbox.path_inside(mount)}/data") == "42"
    await sandbox.stop()
    assert (source / "data").exists()


TREE = "(setsid sh -c 'sleep {0} & sleep {0}' &) ; nohup sleep {0} & sleep {0} & "


async def test_timeout_ends_the_whole_tree(sandbox: Sandbox, token: str) -> None:
    result = await sandbox.exec(sh(TREE.format(token) + f"sleep {token}"), timeout=0.5, log_name="test")
    assert result.timed_out
    assert result.exit_code == -signal.SIGTERM
    assert sleepers(token) == []


async def test_timeout_lets_a_command_clean_up(sandbox: Sandbox) -> None:
    script = "trap 'echo bye > bye; exit 3' TERM; sleep 60 & echo > ready; wait"
    result = await sandbox.exec(sh(script), timeout=1.0, log_name="test")
    assert (result.exit_code, result.timed_out) == (3, True)
    assert await sandbox.download(PurePosixPath("bye")) == b"bye\n"


async def test_timeout_kills_what_does_not_listen(sandbox: Sandbox, token: str) -> None:
    script = f"trap '' TERM; sleep {token}"
    result = await sandbox.exec(sh(script), timeout=0.3, log_name="test")
    assert (result.exit_code, result.timed_out) == (-signal.SIGKILL, True)
    assert sleepers(token) == []


async def test_what_a_command_leaves_behind_ends_with_it(sandbox: Sandbox, token: str) -> None:
    result = await sandbox.exec(sh(TREE.format(token) + "exit 5"), timeout=20, log_name="test")
    assert result.exit_code == 5
    assert sleepers(token) == []


async def test_cancelling_ends_the_whole_tree(sandbox: Sandbox, token: str) -> None:
    task = asyncio.create_task(
        sandbox.exec(sh(TREE.format(token) + f"sleep {token}"), timeout=60, log_name="test")
    )
    await eventually(lambda: len(sleepers(token)) >= 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sleepers(token) == []


async def test_cancelling_at_once_leaves_nothing(sandbox: Sandbox, token: str) -> None:
    task = asyncio.create_task(sandbox.exec(sh(f"sleep {token}"), timeout=60, log_name="test"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sleepers(token) == []


async def test_kill_ends_every_process_and_keeps_the_files(sandbox: Sandbox, token: str) -> None:
    task = asyncio.create_task(
        sandbox.exec(sh("touch kept; " + TREE.format(token) + f"sleep {token}"), timeout=60, log_name="test")
    )
    await eventually(lambda: len(sleepers(token)) >= 5)
    await sandbox.kill()
    assert sleepers(token) == []
    assert (await task).exit_code == -signal.SIGKILL
    assert await sandbox.download(PurePosixPath("kept")) == b""


async def test_output_beyond_the_limit_is_discarded_and_said(runtime: type[Runtime], tmp_path: Path) -> None:
    sandbox = await runtime(runtime.Options(output_limit=5000)).start(spec(tmp_path / "s1"))
    script = "head -c 3000000 /dev/zero; head -c 5000 /dev/zero >&2; echo done > done"
    result = await sandbox.exec(sh(script), timeout=20, log_name="test")
    kept, last_line = result.stdout.read_bytes()[:5000], result.stdout.read_bytes()[5000:]
    assert kept == bytes(5000)
    assert last_line == b"\n[polar: output beyond 5000 bytes was discarded]\n"
    assert result.stderr.read_bytes() == bytes(5000)
    assert await sandbox.download(PurePosixPath("done")) == b"done\n"
    await sandbox.stop()


async def test_files_go_in_and_come_out(sandbox: Sandbox) -> None:
    data = secrets.token_bytes(100_000)
    await sandbox.upload(PurePosixPath("deep/er/file"), data)
    await sandbox.upload(sandbox.home / ".config" / "x", b"#!/bin/sh\necho ran\n", executable=True)
    assert await sandbox.download(sandbox.workspace / "deep/er/file") == data
    assert await output(sandbox, '"$HOME/.config/x"; test -x deep/er/file || echo plain') == "ran\nplain\n"
    await sandbox.upload(PurePosixPath("deep/er/file"), b"new")
    assert await output(sandbox, "cat deep/er/file; echo >> deep/er/file") == "new"


async def test_links_are_never_followed(sandbox: Sandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    await output(sandbox, f"ln -s {outside} dir; ln -s {outside}/secret leak; ln -s {outside}/secret over")
    for path in ("dir/secret", "leak"):
        with pytest.raises(PathRefused):
            await sandbox.download(PurePosixPath(path))
    with pytest.raises(PathRefused):
        await sandbox.upload(PurePosixPath("dir/planted"), b"x")
    await sandbox.upload(PurePosixPath("over"), b"replaced")
    assert await sandbox.download(PurePosixPath("over")) == b"replaced"
    assert (outside / "secret").read_text() == "secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


async def test_only_regular_files_are_read(sandbox: Sandbox) -> None:
    await output(sandbox, "mkdir dir; mkfifo pipe; echo 12345 > big")
    for path in ("dir", "pipe"):
        with pytest.raises(PathRefused):
            await sandbox.download(PurePosixPath(path))
    with pytest.raises(SandboxError, match="no such file"):
        await sandbox.download(PurePosixPath("absent/file"))
    with pytest.raises(SandboxError, match="larger than 5 bytes"):
        await sandbox.download(PurePosixPath("big"), max_bytes=5)


@pytest.mark.parametrize("path", ["../up", "a/../../up", "/etc/passwd", "/", "."])
async def test_paths_outside_are_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(PathRefused):
        await sandbox.upload(PurePosixPath(path), b"x")
    with pytest.raises(PathRefused):
        await sandbox.download(PurePosixPath(path))


async def test_stop_removes_everything_but_the_logs(sandbox: Sandbox, tmp_path: Path) -> None:
    await output(
        sandbox,
        "mkdir -p locked/inner; touch locked/inner/file; chmod 0 locked/inner locked; ln -s / everything;"
        "i=0; while [ $i -lt 1500 ]; do mkdir d; cd d; i=$((i+1)); done; touch bottom; chmod 0 $HOME",
    )
    await sandbox.stop()
    assert [path.name for path in (tmp_path / "s1").iterdir()] == ["logs"]
    assert sorted(path.name for path in (tmp_path / "s1" / "logs").iterdir()) == [
        "test.stderr",
        "test.stdout",
    ]


async def test_stop_of_a_busy_sandbox_and_a_second_stop(sandbox: Sandbox, token: str) -> None:
    task = asyncio.create_task(sandbox.exec(sh(f"sleep {token}"), timeout=60, log_name="test"))
    await eventually(lambda: sleepers(token) != [])
    await sandbox.stop()
    await sandbox.stop()
    assert sleepers(token) == []
    assert (await task).exit_code == -signal.SIGKILL


async def test_a_root_holds_one_sandbox_at_a_time(
    runtime: type[Runtime], sandbox: Sandbox, tmp_path: Path
) -> None:
    with pytest.raises(SandboxError, match="already holds a sandbox"):
        await runtime(runtime.Options()).start(spec(tmp_path / "s1"))


async def test_commands_run_side_by_side(sandbox: Sandbox) -> None:
    scripts = (
        "echo > one; while ! test -e two; do sleep 0.01; done",
        "echo > two; while ! test -e one; do sleep 0.01; done",
    )
    results = await asyncio.gather(
        *(sandbox.exec(sh(script), timeout=20, log_name=f"n{n}") for n, script in enumerate(scripts))
    )
    assert [result.exit_code for result in results] == [0, 0]


async def test_bad_commands_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError):
        await sandbox.exec(Command(("true",)), timeout=1, log_name="../escape")
    result = await sandbox.exec(Command(("true",), cwd=PurePosixPath("/no/such")), timeout=9, log_name="t")
    assert result.exit_code != 0


NODE = """
import asyncio, sys
from pathlib import Path
from polar import plugins
from polar.runtimes.base import Command, SandboxSpec
async def main(name, root, script):
    runtime = plugins.load("runtimes", name)
    sandbox = await runtime(runtime.Options()).start(SandboxSpec("s1", Path(root), "127.0.0.1", 9))
    await sandbox.exec(Command(("/bin/sh", "-c", script)), timeout=600, log_name="agent")
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def doomed_node(
    runtime: type[Runtime], tmp_path: Path, token: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that runs a sandbox full of sleepers below `tmp_path`."""
    name = next(name for name, kind in RUNTIMES.items() if kind is runtime)
    script = TREE.format(token) + f"sleep {token}"
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, name, str(tmp_path / "s1"), script
    )
    await eventually(lambda: len(sleepers(token)) >= 5)
    yield node
    if node.returncode is None:
        node.kill()
    await node.wait()


async def test_sandbox_dies_with_its_node(
    runtime: type[Runtime], doomed_node: asyncio.subprocess.Process, token: str, tmp_path: Path
) -> None:
    doomed_node.kill()
    await eventually(lambda: sleepers(token) == [])
    assert await runtime.reap(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
    assert await runtime.reap(tmp_path) == 0


async def test_reap_ends_what_a_dead_supervisor_left(
    runtime: type[Runtime], doomed_node: asyncio.subprocess.Process, token: str, tmp_path: Path
) -> None:
    (pid_file,) = (tmp_path / "s1" / "pids").iterdir()
    supervisor = json.loads(pid_file.read_text())["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    doomed_node.kill()
    await doomed_node.wait()
    os.kill(supervisor, signal.SIGKILL)
    await eventually(lambda: not psutil.pid_exists(supervisor))
    assert await runtime.reap(tmp_path) == 1
    assert sleepers(token) == []
    assert list(tmp_path.iterdir()) == []


async def test_supervisor_death_is_an_error_and_leaves_nothing(
    sandbox: Sandbox, token: str, tmp_path: Path
) -> None:
    task = asyncio.create_task(
        sandbox.exec(sh(TREE.format(token) + f"sleep {token}"), timeout=60, log_name="test")
    )
    await eventually(lambda: len(sleepers(token)) >= 5)
    (pid_file,) = (tmp_path / "s1" / "pids").iterdir()
    os.kill(json.loads(pid_file.read_text())["pid"], signal.SIGKILL)
    with pytest.raises(SandboxError, match="supervisor"):
        await task
    await eventually(lambda: sleepers(token) == [])


async def test_sandbox_root_is_closed_to_other_users(sandbox: Sandbox, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "s1").stat().st_mode) == 0o700
