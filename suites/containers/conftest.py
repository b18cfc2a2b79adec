"""Real container engines of the suite's own, with one small image made of this machine's files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.assets.node import node
from polar.runtimes.disk import unmount_below
from suites.engines import missing, running
from tests.conformance import Target
from tests.conformance import host as host  # a fixture

IMAGE = "polar-conformance:latest"


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
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


@pytest.fixture(scope="session", params=["docker", "podman"])
def target(
    request: pytest.FixtureRequest, image_archive: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    with running(request.param, image_archive, IMAGE, tmp_path_factory.mktemp(request.param)) as engine:
        yield engine


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, env={"PATH": _PATH}).stdout
    except OSError as error:
        print(error, file=sys.stderr)
        return ""


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
