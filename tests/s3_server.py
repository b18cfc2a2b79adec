"""A real S3-compatible server, from PyPI, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polar.assets.cache import asset
from polar.assets.pytool import PYTHON_TAG, install_python

VERSION = "5.1.22"


def _install(into: Path) -> None:
    # Apart from this environment: its botocore asks for a python-dateutil older than ours.
    requirements = [f"moto[s3]=={VERSION}", "flask==3.1.3", "flask-cors==6.0.5", "python-dateutil<3"]
    install_python(requirements, into)


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """The address of a server with one empty bucket."""
    packages = asset(f"moto-server-{VERSION}-{PYTHON_TAG}", _install)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = "from moto.server import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program, "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, "PYTHONPATH": str(packages)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _make_bucket(f"{url}/{bucket}", process)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _make_bucket(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    request = urllib.request.Request(url, method="PUT")
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10):
                return
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            assert process.poll() is None, "the S3 server ended at once"
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(0.1)
