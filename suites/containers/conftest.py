"""Real container engines of the suite's own, with one small image made of this machine's files.

Docker gets a daemon on a private socket, podman a private store; both end with the suite. Where one
cannot run, its tests are skipped and say what is missing; with CI set, they fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.assets.node import node
from polar.runtimes.disk import unmount_below
from tests.conformance import Target

IMAGE = "polar-conformance:latest"
START_SECONDS = 60

PODMAN_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{directory}/store"
runroot = "{directory}/run"
"""
PODMAN_ENGINE = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


def missing(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(f"NOT TESTED on this machine: {reason}")


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays_mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither what engines keep mounted below their stores, nor the disk of a sandbox whose test failed."""
    yield
    unmount_below(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def image_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of busybox and the libraries that Node.js is linked to, without a registry."""
    busybox = shutil.which("busybox")
    if busybox is None or "=>" in _output("ldd", busybox):
        missing("a static busybox (Debian: apt-get install busybox-static)")
    assert busybox is not None
    root = tmp_path_factory.mktemp("image")
    for name in (
        "bin",
        "usr/bin",
        "etc",
        "tmp",
        "workspace",
        "home/agent",
        "testbed",
        "var/tmp",
        "run",
        "proc",
    ):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(busybox, root / "bin" / "busybox")
    for applet in _output(busybox, "--list").split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    # Debian's busybox does without it.
    (root / "usr" / "bin" / "nohup").write_text('#!/bin/sh\nexec "$@"\n')
    (root / "usr" / "bin" / "nohup").chmod(0o755)
    (root / "testbed" / "README").write_text("from the image\n")
    for library in re.findall(r"(?<=[\s])/\S+", _output("ldd", str(node() / "bin" / "node"))):
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    archive = root.with_suffix(".tar")
    with tarfile.open(archive, "w") as tar:
        tar.add(root, ".")
    return archive


@pytest.fixture(scope="session")
def docker(image_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    for program, package in (("docker", "docker.io"), ("dockerd", "docker.io"), ("containerd", "containerd")):
        if shutil.which(program) is None:
            missing(f"{program} (Debian: {package})")
    if os.geteuid() != 0:
        missing("root, to start a Docker daemon of the suite's own")
    directory = tmp_path_factory.mktemp("docker")
    socket = f"unix://{directory}/docker.sock"
    options = {
        "--host": socket,
        "--data-root": str(directory / "data"),
        "--exec-root": str(directory / "exec"),
        "--pidfile": str(directory / "pid"),
        "--bridge": "none",
    }
    arguments = [part for option in options.items() for part in option]
    log = directory / "daemon.log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            ["dockerd", "--iptables=false", "--ip6tables=false", *arguments], stdout=output, stderr=output
        )
    os.environ["DOCKER_HOST"] = socket
    try:
        _wait_for_docker(daemon, log)
        subprocess.run(["docker", "import", str(image_archive), IMAGE], check=True, stdout=subprocess.DEVNULL)
        yield Target("docker", {"image": IMAGE, "pull": "never"}, start_seconds=3.0)
    finally:
        daemon.terminate()
        daemon.wait()
        del os.environ["DOCKER_HOST"]


@pytest.fixture(scope="session")
def podman(image_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    for program in ("podman", "runc"):
        if shutil.which(program) is None:
            missing(f"{program} (Debian: {program})")
    directory = tmp_path_factory.mktemp("podman")
    settings = {
        "CONTAINERS_STORAGE_CONF": (directory / "storage.conf", PODMAN_STORAGE),
        "CONTAINERS_CONF": (directory / "containers.conf", PODMAN_ENGINE),
    }
    for variable, (path, text) in settings.items():
        path.write_text(text.format(directory=directory))
        os.environ[variable] = str(path)
    try:
        made = subprocess.run(["podman", "import", str(image_archive), IMAGE], capture_output=True, text=True)
        if made.returncode != 0:
            missing(f"a podman that works: {made.stderr.strip()}")
        yield Target("podman", {"image": f"localhost/{IMAGE}", "pull": "never"}, start_seconds=3.0)
    finally:
        subprocess.run(["podman", "rm", "--all", "--force"], capture_output=True)
        for variable in settings:
            del os.environ[variable]


@pytest.fixture(params=["docker", "podman"])
def target(request: pytest.FixtureRequest) -> Target:
    engine: Target = request.getfixturevalue(request.param)
    return engine


def _wait_for_docker(daemon: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and daemon.poll() is None:
        if subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
            return
        time.sleep(0.2)
    missing(f"a Docker daemon that starts: {log.read_text(errors='replace')[-1000:]}")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, env={"PATH": _PATH}).stdout
    except OSError as error:
        print(error, file=sys.stderr)
        return ""


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
