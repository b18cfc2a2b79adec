"""Container engines of a suite's own: Docker gets a daemon on a private socket, podman a private store.

Where one cannot run, whoever asks for it is skipped and told what is missing; with CI set, that fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.conformance import Target
from tests.waiting import eventually_sync

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
PROGRAMS = {"docker": ("docker", "dockerd", "containerd"), "podman": ("podman", "runc")}


def missing(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(f"NOT TESTED on this machine: {reason}")


def lacking(engine: str) -> list[str]:
    """The programs of an engine that are not installed."""
    return [program for program in PROGRAMS[engine] if shutil.which(program) is None]


@contextmanager
def running(engine: str, archive: Path, image: str, directory: Path) -> Iterator[Target]:
    """An engine with one image, made of a tar archive of its files."""
    if absent := lacking(engine):
        missing(f"{', '.join(absent)} (Debian: apt-get install docker.io containerd podman runc)")
    start = _docker if engine == "docker" else _podman
    with start(archive, image, directory) as options:
        yield Target(engine, options, start_seconds=3.0)


@contextmanager
def _docker(archive: Path, image: str, directory: Path) -> Iterator[dict[str, str]]:
    if os.geteuid() != 0:
        missing("root, to start a Docker daemon of the suite's own")
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
        subprocess.run(["docker", "import", str(archive), image], check=True, stdout=subprocess.DEVNULL)
        yield {"image": image, "pull": "never"}
    finally:
        daemon.terminate()
        daemon.wait()
        del os.environ["DOCKER_HOST"]


@contextmanager
def _podman(archive: Path, image: str, directory: Path) -> Iterator[dict[str, str]]:
    settings = {
        "CONTAINERS_STORAGE_CONF": (directory / "storage.conf", PODMAN_STORAGE),
        "CONTAINERS_CONF": (directory / "containers.conf", PODMAN_ENGINE),
    }
    for variable, (path, text) in settings.items():
        path.write_text(text.format(directory=directory))
        os.environ[variable] = str(path)
    try:
        made = subprocess.run(["podman", "import", str(archive), image], capture_output=True, text=True)
        if made.returncode != 0:
            missing(f"a podman that works: {made.stderr.strip()}")
        yield {"image": f"localhost/{image}", "pull": "never"}
    finally:
        subprocess.run(["podman", "rm", "--all", "--force"], capture_output=True)
        for variable in settings:
            del os.environ[variable]


def _wait_for_docker(daemon: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        return subprocess.run(["docker", "info"], capture_output=True).returncode == 0

    with suppress(AssertionError):
        eventually_sync(lambda: answers() or daemon.poll() is not None, START_SECONDS, every=0.2)
    if not answers():
        missing(f"a Docker daemon that starts: {log.read_text(errors='replace')[-1000:]}")
