"""What Docker, podman and Apptainer are ordered to do, and what their answers are taken for."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from polar.config import plugins
from polar.errors import InvalidInput, Unavailable
from polar.models.component import Component
from polar.runtimes.apptainer import ApptainerRuntime, ApptainerSandbox
from polar.runtimes.base import (
    Command,
    Host,
    ImageNotFound,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
    ToolDirectory,
)
from polar.runtimes.cgroups import node_name
from polar.runtimes.containers import container_name
from polar.runtimes.docker import DockerRuntime, DockerSandbox, PodmanRuntime
from tests.fakes.engine_cli import FakeEngine, fake_engine

RUNNING_AS_ROOT = {"SecurityOptions": ["name=seccomp,profile=default"], "ServerErrors": None}
ROOTLESS = {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return fake_engine("docker", tmp_path / "bin")


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return fake_engine("apptainer", tmp_path / "bin")


SPEC = SandboxSpec("s1", "127.0.0.1", 9)
TOOL = ToolDirectory(Path("/cache/a,b"), PurePosixPath("/opt/tool"))
WITH_TOOL = replace(SPEC, tools=(TOOL,))


def described(at: Path, *, rootless: bool = False, **options: object) -> list[str]:
    """The orders for a container with one tool directory whose name has a comma."""
    parsed = DockerRuntime.Options.model_validate({"image": "debian:12", **options})
    sandbox = DockerSandbox(WITH_TOOL, Host(at), parsed, DockerRuntime)
    return list(sandbox.create_arguments(rootless=rootless))


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_a_container_is_closed_unless_told_otherwise(tmp_path: Path) -> None:
    arguments = described(tmp_path)
    assert value(arguments, "--network") == "none"
    assert value(arguments, "--cap-drop") == "ALL"
    assert value(arguments, "--security-opt") == "no-new-privileges"
    assert "--read-only" in arguments
    assert "--privileged" not in arguments
    assert arguments[-3] == "debian:12"


def test_commands_are_told_of_the_proxy_only_where_a_list_opens_it(
    docker: FakeEngine, tmp_path: Path
) -> None:
    for allow in ([], ["pypi.org:443"]):
        host = Host(tmp_path / f"node{len(allow)}")
        root = host.sandboxes / "s1"
        root.mkdir(parents=True)
        options = DockerRuntime.Options.model_validate({"image": "debian:12", "network": {"allow": allow}})
        sandbox = DockerSandbox(SPEC, host, options, DockerRuntime)
        sandbox.launch(Command(("true",)), root / "out", root / "err")
        (env_file,) = root.glob("env-*")
        assert ("https_proxy=http://127.0.0.1:47101\n" in env_file.read_text()) is bool(allow)
        assert list(map(str, DockerRuntime(options).reaches.destinations)) == allow
        # The container itself has no network in either case.
        assert value(list(sandbox.create_arguments(rootless=False)), "--network") == "none"


def test_limits_reach_the_engine(tmp_path: Path) -> None:
    limits = {"memory": "1GiB", "pids": 100, "cpus": 1.5}
    arguments = described(tmp_path, limits=limits)
    assert value(arguments, "--memory") == value(arguments, "--memory-swap") == str(1024**3)
    assert value(arguments, "--pids-limit") == "100"
    assert value(arguments, "--cpus") == "1.5"
    unlimited = described(tmp_path, limits={"memory": None, "pids": None})
    assert not {"--memory", "--pids-limit", "--cpus"} & set(unlimited)


def test_mounts_are_read_only_whatever_their_names(tmp_path: Path) -> None:
    arguments = described(tmp_path)
    mounts = [arguments[n + 1] for n, argument in enumerate(arguments) if argument == "--mount"]
    assert mounts[-1] == 'type=bind,"source=/cache/a,b",destination=/opt/tool,ro'
    assert [mount.rpartition("destination=")[2] for mount in mounts[:-1]] == [
        "/workspace",
        "/home/agent",
        "/tmp",
    ]


def test_a_workspace_of_the_image_is_not_covered(tmp_path: Path) -> None:
    arguments = described(tmp_path, workspace="/testbed", root="writable")
    assert "--read-only" not in arguments
    mounted = [argument.rpartition("destination=")[2] for argument in arguments]
    assert not {"/testbed", "/workspace"} & set(mounted)


def test_rootless_containers_run_as_the_nodes_own_user(tmp_path: Path) -> None:
    assert value(described(tmp_path, rootless=True), "--user") == "0:0"
    assert "--user" not in described(tmp_path)


def test_containers_of_two_nodes_are_told_apart(tmp_path: Path) -> None:
    one, other = described(tmp_path / "one"), described(tmp_path / "other")
    assert value(one, "--label") != value(other, "--label")
    assert value(one, "--name") != value(other, "--name")


def test_secrets_are_not_on_the_command_line(docker: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "sessions/s1").mkdir(parents=True)
    options = DockerRuntime.Options(image="debian:12")
    sandbox = DockerSandbox(SPEC, Host(tmp_path), options, DockerRuntime)
    command = Command(("agent", "--now"), env={"KEY": "hush hush = yes"})
    launch = sandbox.launch(command, tmp_path / "out", tmp_path / "err")
    assert launch.argv[:2] == (str(tmp_path / "bin" / "docker"), "exec")
    assert launch.argv[-3:] == (sandbox.name, "agent", "--now")
    assert not any("hush" in argument for argument in launch.argv)
    env_file = Path(value(list(launch.argv), "--env-file"))
    assert "KEY=hush hush = yes" in env_file.read_text().splitlines()
    assert env_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("env", [{"KEY": "two\nlines"}, {"A=B": "x"}, {"": "x"}])
def test_an_environment_that_cannot_be_passed_on_is_refused(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "sessions/s1").mkdir(parents=True)
    options = DockerRuntime.Options(image="debian:12")
    sandbox = DockerSandbox(SPEC, Host(tmp_path), options, DockerRuntime)
    with pytest.raises(SandboxError, match="do not support the environment variable"):
        sandbox.launch(Command(("true",), env=env), tmp_path / "out", tmp_path / "err")


@pytest.mark.parametrize("name", ["docker", "podman", "apptainer"])
def test_a_workspace_of_a_read_only_image_is_refused(name: str) -> None:
    options = {"image": "x", "workspace": "/testbed", "root": "read_only"}
    with pytest.raises(InvalidInput, match="requires root"):
        plugins.create("runtimes", "runtime", Component.model_validate({"name": name, "options": options}))


@pytest.mark.parametrize("image", ["", "--privileged", "a b"])
def test_what_cannot_be_an_image_is_refused(image: str) -> None:
    with pytest.raises(InvalidInput, match=r"runtime\.options\.image"):
        plugins.create("runtimes", "runtime", Component(name="docker", options={"image": image}))


@pytest.mark.parametrize(
    ("complaint", "kind"),
    [
        ("Error: No such image: nothing:latest", ImageNotFound),
        ("Unable to find image 'x:latest' locally\ndocker: pull access denied for x", ImageNotFound),
        ('Error: short-name "x" did not resolve to an alias and no registries are defined', ImageNotFound),
        ("Error: x: image not known", ImageNotFound),
        ("docker: invalid reference format.", ImageNotFound),
        ("Cannot connect to the Docker daemon at unix:///x.sock. Is it running?", SandboxUnavailable),
        ("dial tcp: lookup registry: i/o timeout", SandboxUnavailable),
        ("write /var/lib: no space left on device", SandboxUnavailable),
        ("docker: Minimum memory limit allowed is 6MB.", SandboxError),
        ("", SandboxError),
    ],
)
def test_complaints_are_understood(complaint: str, kind: type[SandboxError]) -> None:
    error = DockerRuntime.failure("create", complaint)
    assert type(error) is kind
    assert isinstance(error, Unavailable) == (kind is SandboxUnavailable)
    assert str(error).startswith("docker create: ")


async def test_an_unknown_image_leaves_nothing_behind(docker: FakeEngine, tmp_path: Path) -> None:
    docker.answer(
        info={"stdout": json.dumps(ROOTLESS)},
        create={"code": 1, "stderr": "Error: No such image: nothing:latest"},
        rm={"code": 1, "stderr": "Error: No such container: x"},
    )
    runtime = DockerRuntime(DockerRuntime.Options(image="nothing"))
    with pytest.raises(ImageNotFound, match="nothing"):
        await runtime.start(SPEC, Host(tmp_path))
    assert list((tmp_path / "sessions").iterdir()) == []
    assert [order[0] for order in docker.orders] == ["info", "create", "rm"]


async def test_a_container_that_ends_at_once_says_why(docker: FakeEngine, tmp_path: Path) -> None:
    docker.answer(
        info={"stdout": json.dumps(ROOTLESS)},
        start={"code": 1, "stderr": "Error: exec: /bin/sh: no such file or directory"},
        inspect={"stdout": "0", "seconds": 0.2},
    )
    runtime = DockerRuntime(DockerRuntime.Options(image="scratch"))
    with pytest.raises(SandboxError, match="/bin/sh"):
        await runtime.start(SPEC, Host(tmp_path))
    assert docker.orders[-1][0] == "rm"
    assert list((tmp_path / "sessions").iterdir()) == []


async def test_a_container_of_another_machine_is_refused(docker: FakeEngine, tmp_path: Path) -> None:
    docker.answer(
        info={"stdout": json.dumps(ROOTLESS)}, start={"seconds": 30}, inspect={"stdout": str(os.getpid())}
    )
    runtime = DockerRuntime(DockerRuntime.Options(image="debian"))
    with pytest.raises(SandboxError, match="run the engine on the node's machine"):
        await runtime.start(SPEC, Host(tmp_path))
    assert list((tmp_path / "sessions").iterdir()) == []


async def test_a_missing_engine_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for runtime, name in (
        (DockerRuntime, "docker"),
        (PodmanRuntime, "podman"),
        (ApptainerRuntime, "apptainer"),
    ):
        assert f"{name} is not installed" in str(await runtime.unavailable())
        assert await runtime.reap(Host(tmp_path)) == 0


async def test_a_daemon_that_is_down_is_asked_again(docker: FakeEngine) -> None:
    docker.answer(info={"code": 1, "stderr": "Cannot connect to the Docker daemon at unix:///x"})
    assert "Cannot connect" in str(await DockerRuntime.unavailable())
    docker.answer(info={"stdout": json.dumps(ROOTLESS)})
    assert await DockerRuntime.unavailable() is None


async def test_an_engine_of_root_needs_a_node_of_root(
    docker: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.answer(info={"stdout": json.dumps(RUNNING_AS_ROOT)})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "or the node as root" in str(await DockerRuntime.unavailable())


def test_podman_says_in_its_own_way_that_it_is_rootless() -> None:
    assert PodmanRuntime.is_rootless({"host": {"security": {"rootless": True}}})
    assert not PodmanRuntime.is_rootless({"host": {"security": {"rootless": False}}})
    assert not PodmanRuntime.is_rootless({})


async def test_an_engine_that_does_not_answer_is_not_waited_for(docker: FakeEngine) -> None:
    docker.answer(info={"seconds": 60})
    with pytest.raises(SandboxUnavailable, match="no answer within"):
        await DockerRuntime.call("info", timeout=0.2)


async def test_reap_removes_only_the_nodes_own_containers(docker: FakeEngine, tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    own = container_name(sessions / "s1")
    docker.answer(ps={"stdout": f"{own}\nsomebody-elses\n"})
    assert await DockerRuntime.reap(Host(tmp_path)) == 0
    assert [order for order in docker.orders if order[0] == "rm"] == [["rm", "--force", "--volumes", own]]


def instance(at: Path, **options: object) -> list[str]:
    parsed = ApptainerRuntime.Options.model_validate({"image": "/images/a.sif", **options})
    sandbox = ApptainerSandbox(WITH_TOOL, Host(at), parsed, ApptainerRuntime)
    return list(sandbox.start_arguments())


def test_an_instance_is_closed_unless_told_otherwise(tmp_path: Path) -> None:
    arguments = instance(tmp_path, limits={"cpus": 2})
    assert {"--containall", "--cleanenv", "--no-home", "--no-privs", "--net"} <= set(arguments)
    assert value(arguments, "--network") == "none"
    assert value(arguments, "--cpus") == "2"
    assert "--writable-tmpfs" in arguments
    assert "--nv" not in arguments
    assert 'type=bind,"source=/cache/a,b",destination=/opt/tool,ro' in arguments
    assert arguments[-2:] == ["/images/a.sif", container_name(tmp_path / "sessions/s1")]
    assert "--nv" in instance(tmp_path, nv=True)
    assert "--overlay" in instance(tmp_path, root="overlay")


def test_an_instances_command_gets_its_arguments_unread(apptainer: FakeEngine, tmp_path: Path) -> None:
    options = ApptainerRuntime.Options(image="/images/a.sif")
    sandbox = ApptainerSandbox(SPEC, Host(tmp_path), options, ApptainerRuntime)
    argv = sandbox.exec_argv(Command(("echo", "$HOME")), Path("/root/env-1"))
    assert argv[:2] == (str(tmp_path / "bin" / "apptainer"), "exec")
    assert "--no-eval" in argv
    assert argv[-3:] == (f"instance://{sandbox.name}", "echo", "$HOME")


async def test_instances_are_read_from_their_list(apptainer: FakeEngine) -> None:
    listed = {"instances": [{"instance": "one", "pid": 41, "img": "/a.sif", "ip": ""}]}
    apptainer.answer(instance_list={"stdout": json.dumps(listed)})
    assert await ApptainerRuntime.instances("one") == {"one": 41}
    await ApptainerRuntime.remove("one")
    await ApptainerRuntime.remove("two")
    stops = [order for order in apptainer.orders if order[:2] == ["instance", "stop"]]
    assert stops == [["instance", "stop", "--signal", "SIGKILL", "one"]]
    for garbage in ("", "[]", '{"instances": [{}]}', "INSTANCE NAME  PID"):
        apptainer.answer(instance_list={"stdout": garbage})
        with pytest.raises(SandboxError, match="cannot be parsed"):
            await ApptainerRuntime.instances("one")


async def test_an_image_of_the_host_must_lie_where_the_operator_allows(
    apptainer: FakeEngine, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "link").symlink_to("/")
    for image in ("/", "/etc", str(images / "link"), f"{images}/../bin"):
        runtime = ApptainerRuntime(ApptainerRuntime.Options(image=image))
        with pytest.raises(SandboxError, match=r"not below node\.upload_roots"):
            await runtime.start(SPEC, Host(tmp_path, image_roots=(images,)))
    runtime = ApptainerRuntime(ApptainerRuntime.Options(image=str(images / "absent.sif")))
    with pytest.raises(ImageNotFound, match="no such image"):
        await runtime.start(SPEC, Host(tmp_path, image_roots=(images,)))
    assert apptainer.orders == []


async def test_a_failing_instance_leaves_nothing_behind(apptainer: FakeEngine, tmp_path: Path) -> None:
    apptainer.answer(
        instance_start={"code": 255, "stderr": "FATAL: while loading: could not open image docker://x"},
        instance_list={"stdout": '{"instances": []}'},
    )
    runtime = ApptainerRuntime(ApptainerRuntime.Options(image="docker://x"))
    with pytest.raises(ImageNotFound, match="could not open image"):
        await runtime.start(SPEC, Host(tmp_path))
    assert list((tmp_path / "sessions").iterdir()) == []


async def test_reap_stops_only_the_nodes_own_instances(apptainer: FakeEngine, tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    own = container_name(sessions / "s1")
    apptainer.answer(instance_list={"stdout": json.dumps({"instances": [{"instance": own, "pid": 1}]})})
    assert await ApptainerRuntime.reap(Host(tmp_path)) == 0
    assert apptainer.orders[0][-1] == f"{node_name(sessions)}-*"
    assert apptainer.orders[-1][:2] == ["instance", "stop"]
