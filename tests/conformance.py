"""What every runtime promises: tests of real sandboxes, run for each by the files that import them.

Whoever imports them gives them a fixture `target`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import stat
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.models.component import Component
from polar.runtimes.base import (
    Command,
    Host,
    Limit,
    PathRefused,
    Runtime,
    Sandbox,
    SandboxError,
    SandboxSpec,
    ToolDirectory,
)
from polar.runtimes.disk import mounts_below
from tests.waiting import eventually, turns


@dataclass(frozen=True)
class Target:
    """A runtime under test, and the options without which it makes no sandbox."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 0.0
    """What its commands may take to begin, beyond what a process does."""
    elsewhere: Path | None = None
    """The directory of whoever makes the sandboxes, where that is not the node."""

    @property
    def kind(self) -> type[Runtime]:
        kind: type[Runtime] = plugins.load("runtimes", self.name)
        return kind

    def runtime(self, **options: object) -> Runtime:
        component = Component.model_validate({"name": self.name, "options": {**self.options, **options}})
        runtime: Runtime = plugins.create("runtimes", "runtime", component)
        return runtime

    def left(self, host: Host) -> list[Path]:
        """What there is of sandboxes, and what is mounted for them."""
        maker = Host(self.elsewhere or host.directory)
        roots = list(maker.sandboxes.iterdir()) if maker.sandboxes.is_dir() else []
        return roots + mounts_below(maker.directory)

    def snapshots(self, host: Host) -> list[Path]:
        return list(Host(self.elsewhere or host.directory).snapshots.iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "node")


@pytest.fixture
async def sandbox(target: Target, host: Host) -> AsyncIterator[Sandbox]:
    started = await target.runtime().start(spec("s1"), host)
    yield started
    await started.stop()


@pytest.fixture
def token() -> str:
    """A number of seconds that no other process sleeps."""
    return f"{1_000_000 + secrets.randbelow(10**9)}"


def spec(name: str, *tools: ToolDirectory) -> SandboxSpec:
    return SandboxSpec(name, "127.0.0.1", 9, tools)


def sh(script: str, **fields: Any) -> Command:
    return Command(("/bin/sh", "-c", script), **fields)


async def output(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(sh(script), timeout=20, log_name="test")
    assert result.exit_code == 0, result.stderr.text()
    return result.stdout.text()


def sleepers(token: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if token in process.cmdline()[1:2]:
                found.append(process.pid)
    return found


async def test_commands_begin_with_the_environment_that_the_task_names(target: Target, host: Host) -> None:
    runtime = target.runtime(environment={"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu"})
    sandbox = await runtime.start(spec("s1"), host)
    try:
        assert await output(sandbox, "echo $PYTHONHASHSEED $TZ $LANG") == "7 Asia/Kathmandu C.UTF-8\n"
    finally:
        await sandbox.stop()


async def test_runtime_works_on_this_machine(target: Target) -> None:
    assert await target.kind.unavailable() is None


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
    assert "/no/such/program" in result.stdout.text() + result.stderr.text()


async def test_stdin_is_given_then_closed(sandbox: Sandbox) -> None:
    given = b"line\n" * 100_000
    result = await sandbox.exec(Command(("cat",), stdin=given), timeout=20, log_name="test")
    assert result.stdout.read() == given


async def test_environment_is_not_inherited(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "open sesame")
    names = {line.partition("=")[0] for line in (await output(sandbox, "env")).splitlines()}
    extras = {"PWD", "POLAR_SANDBOX", "POLAR_COMMAND", "HOSTNAME", "TERM", "container", "SHLVL"}
    own = {"PATH", "LANG", "TZ", "PYTHONHASHSEED", "USER", "LOGNAME", "SHELL", "HOME", "TMPDIR"}
    assert names - extras == own


async def test_every_sandbox_has_one_time_zone_and_hash_seed(sandbox: Sandbox) -> None:
    assert await output(sandbox, "echo $PYTHONHASHSEED; date +%Z") == "0\nUTC\n"


async def test_command_adds_to_the_environment(sandbox: Sandbox) -> None:
    command = sh('printf %s "$LANG $WORD"', env={"WORD": "ä = b", "LANG": "C"})
    result = await sandbox.exec(command, timeout=20, log_name="test")
    assert result.stdout.text() == "C ä = b"


async def test_work_begins_in_the_workspace_or_where_asked(sandbox: Sandbox) -> None:
    assert await output(sandbox, "pwd") == f"{sandbox.workspace}\n"
    result = await sandbox.exec(sh("pwd", cwd=sandbox.home), timeout=20, log_name="test")
    assert result.stdout.text() == f"{sandbox.home}\n"


async def test_directories_are_private_writable_and_kept_between_commands(sandbox: Sandbox) -> None:
    await output(sandbox, 'touch a "$HOME/b" "$TMPDIR/c"')
    assert (await output(sandbox, 'ls . "$HOME" "$TMPDIR"')).split()[1::2] == ["a", "b", "c"]


async def test_tools_are_found_inside(target: Target, host: Host, tmp_path: Path) -> None:
    source = tmp_path / "tool"
    (source / "bin").mkdir(parents=True)
    (source / "data").write_text("42")
    (source / "link").symlink_to("data")
    (source / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "bin" / "run").chmod(0o755)
    tool = ToolDirectory(source, PurePosixPath("/opt/polar/tool"))
    for name in ("s1", "s2"):
        sandbox = await target.runtime().start(spec(name, tool), host)
        inside = sandbox.tool_path(tool)
        assert await output(sandbox, f"cat {inside}/data {inside}/link; {inside}/bin/run") == "4242ran\n"
        await sandbox.stop()
    assert (source / "data").exists()


TREE = "(setsid sh -c 'sleep {0} & sleep {0}' &) ; nohup sleep {0} & sleep {0} & "


async def test_timeout_ends_the_whole_tree(sandbox: Sandbox, token: str) -> None:
    result = await sandbox.exec(sh(TREE.format(token) + f"sleep {token}"), timeout=0.5, log_name="test")
    assert result.timed_out
    assert result.exit_code == -signal.SIGTERM
    assert sleepers(token) == []


async def test_timeout_lets_a_command_clean_up(target: Target, sandbox: Sandbox) -> None:
    script = "trap 'echo bye > bye; exit 3' TERM; sleep 60 & echo > ready; wait"
    result = await sandbox.exec(sh(script), timeout=3.0 + target.start_seconds, log_name="test")
    assert (result.exit_code, result.timed_out) == (3, True)
    assert await sandbox.download(PurePosixPath("bye")) == b"bye\n"


async def test_timeout_kills_what_does_not_listen(target: Target, sandbox: Sandbox, token: str) -> None:
    script = f"trap '' TERM; sleep {token}"
    result = await sandbox.exec(sh(script), timeout=2.0 + target.start_seconds, log_name="test")
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


async def test_output_is_in_the_nodes_log_while_the_command_runs(sandbox: Sandbox, host: Host) -> None:
    task = asyncio.create_task(
        sandbox.exec(sh("echo early; sleep 60 & wait"), timeout=60, log_name="running")
    )
    log = host.logs / "s1" / "running.stdout"
    await eventually(lambda: log.exists() and log.read_text() == "early\n")
    await sandbox.kill()
    assert (await task).stdout.text() == "early\n"


async def test_output_beyond_the_limit_is_discarded_and_said(target: Target, host: Host) -> None:
    sandbox = await target.runtime(output_limit=5000).start(spec("s1"), host)
    script = "head -c 3000000 /dev/zero; head -c 5000 /dev/zero >&2; echo done > done"
    result = await sandbox.exec(sh(script), timeout=20, log_name="test")
    kept, last_line = result.stdout.read()[:5000], result.stdout.tail(49)
    assert kept == bytes(5000)
    assert last_line == b"\n[polar: output beyond 5000 bytes was discarded]\n"
    assert (result.stdout.is_cut, result.stderr.is_cut) == (True, False)
    assert result.stderr.read() == bytes(5000)
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


async def test_stop_removes_everything_but_the_logs(target: Target, sandbox: Sandbox, host: Host) -> None:
    await output(
        sandbox,
        "mkdir -p locked/inner; touch locked/inner/file; chmod 0 locked/inner locked; ln -s / everything;"
        "i=0; while [ $i -lt 1500 ]; do mkdir d; cd d; i=$((i+1)); done; touch bottom; chmod 0 $HOME",
    )
    await sandbox.stop()
    assert target.left(host) == []
    logs = {path.name for path in (host.logs / "s1").iterdir()}
    assert logs - {"container.stderr", "container.stdout"} == {"test.stderr", "test.stdout"}


async def test_stop_of_a_busy_sandbox_and_a_second_stop(sandbox: Sandbox, token: str) -> None:
    task = asyncio.create_task(sandbox.exec(sh(f"sleep {token}"), timeout=60, log_name="test"))
    await eventually(lambda: sleepers(token) != [])
    await sandbox.stop()
    await sandbox.stop()
    assert sleepers(token) == []
    assert (await task).exit_code == -signal.SIGKILL


@pytest.mark.parametrize("count", [1, 100, 400])
async def test_cancelling_a_start_leaves_nothing(target: Target, host: Host, count: int) -> None:
    starting = asyncio.create_task(target.runtime().start(spec("s1"), host))
    await turns(count)
    if starting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await starting
    else:  # It was started sooner than that.
        await starting.result().stop()
    assert target.left(host) == []


@pytest.mark.parametrize("count", [1, 50, 300])
async def test_cancelling_a_stop_does_not_leave_it_half_done(target: Target, host: Host, count: int) -> None:
    sandbox = await target.runtime().start(spec("s1"), host)
    await output(sandbox, "echo > file")
    stopping = asyncio.create_task(sandbox.stop())
    # At least one: a task that has not begun cannot know that it is not to be cancelled.
    await turns(count)
    stopping.cancel()
    await asyncio.wait({stopping})
    assert target.left(host) == []


async def test_a_name_is_that_of_one_sandbox(target: Target, sandbox: Sandbox, host: Host) -> None:
    with pytest.raises(SandboxError, match="already contains a sandbox"):
        await target.runtime().start(spec("s1"), host)


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
import asyncio, json, sys
from pathlib import Path
from polar.config import plugins
from polar.errors import InvalidInput
from polar.models.component import Component
from polar.runtimes.base import Command, Host, SandboxSpec
async def main(name, options, directory, script):
    runtime = plugins.create("runtimes", "runtime", Component(name=name, options=json.loads(options)))
    sandbox = await runtime.start(SandboxSpec("s1", "127.0.0.1", 9), Host(Path(directory)))
    await sandbox.exec(Command(("/bin/sh", "-c", script)), timeout=600, log_name="agent")
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def doomed_node(target: Target, host: Host, token: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that runs a sandbox full of sleepers as this node."""
    script = TREE.format(token) + f"sleep {token}"
    arguments = (target.name, json.dumps(dict(target.options)), str(host.directory), script)
    node = await asyncio.create_subprocess_exec(sys.executable, "-c", NODE, *arguments)
    await eventually(lambda: len(sleepers(token)) >= 5)
    yield node
    if node.returncode is None:
        node.kill()
    await node.wait()


async def test_sandbox_dies_with_its_node(
    target: Target, doomed_node: asyncio.subprocess.Process, token: str, host: Host
) -> None:
    doomed_node.kill()
    await eventually(lambda: sleepers(token) == [])
    # Whoever makes sandboxes elsewhere may have removed it by then.
    assert await target.kind.reap(host) <= 1
    assert target.left(host) == []
    assert await target.kind.reap(host) == 0


async def test_sandbox_files_are_closed_to_other_users(target: Target, sandbox: Sandbox, host: Host) -> None:
    root, *_ = target.left(host)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


async def test_processes_beyond_the_limit_are_refused_and_told(target: Target, host: Host) -> None:
    sandbox = await target.runtime(limits={"pids": 40}).start(spec("s1"), host)
    try:
        script = "i=0; while [ $i -lt 100 ]; do sleep 5 & i=$((i+1)); done"
        result = await sandbox.exec(sh(script), timeout=20, log_name="test")
        assert Limit.PIDS in result.limits_hit
        assert (await sandbox.exec(sh("true"), timeout=20, log_name="test")).limits_hit == frozenset()
    finally:
        await sandbox.stop()


async def test_memory_beyond_the_limit_is_refused_and_told(target: Target, host: Host) -> None:
    sandbox = await target.runtime(limits={"memory": "64MiB"}).start(spec("s1"), host)
    try:
        # Without a line's end in it, all of its input is kept.
        result = await sandbox.exec(
            sh("head -c 500000000 /dev/zero | tail; exit 3"), timeout=20, log_name="t"
        )
        assert Limit.MEMORY in result.limits_hit
        assert await output(sandbox, "echo back") == "back\n"
    finally:
        await sandbox.stop()


async def test_files_beyond_the_limit_are_refused_and_told(target: Target, host: Host) -> None:
    sandbox = await target.runtime(limits={"disk": "32MiB"}).start(spec("s1"), host)
    try:
        script = "head -c 100000000 /dev/zero > big; exec sleep 2"
        result = await sandbox.exec(sh(script), timeout=20, log_name="test")
        assert result.limits_hit == {Limit.DISK}
    finally:
        await sandbox.stop()


async def test_samples_begin_from_a_snapshot_and_never_change_it(
    target: Target, sandbox: Sandbox, host: Host
) -> None:
    runtime = target.runtime()
    if not runtime.supports_snapshots:
        with pytest.raises(SandboxError, match="no snapshots"):
            await sandbox.snapshot("prepared")
        return
    prepared = await runtime.start(spec("s0"), host)
    await output(
        prepared, "mkdir -p dir; echo one > dir/a; echo two > b; ln -s b c; echo x > $HOME/.rc; chmod 700 dir"
    )
    await prepared.snapshot("prepared")
    await prepared.stop()
    for name in ("a", "b"):
        sample = await runtime.start(replace(spec(name), base="prepared"), host)
        assert await output(sample, "cat dir/a c $HOME/.rc; ls") == "one\ntwo\nx\nb\nc\ndir\n"
        await output(sample, "echo changed > dir/a; rm b $HOME/.rc; echo new > dir/new")
        await sample.upload(PurePosixPath("dir/up"), b"up")
        assert (
            await output(sample, "ls . dir; cat dir/up; echo more >> dir/up")
            == ".:\nc\ndir\n\ndir:\na\nnew\nup\nup"
        )
        assert await sample.download(PurePosixPath("dir/a")) == b"changed\n"
        await sample.stop()
    await runtime.discard("prepared", host)
    assert target.snapshots(host) == []


@pytest.mark.parametrize(
    "limits", [{"memory": "1KiB"}, {"pids": 0}, {"cpus": -1}, {"disk": "much"}, {"swap": 1}, {"cpus": "nan"}]
)
async def test_wrong_limits_are_refused_by_name(target: Target, limits: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=rf"runtime\.options\.limits\.{next(iter(limits))}"):
        target.runtime(limits=limits)
