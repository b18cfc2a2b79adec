"""A real S3-compatible server, from PyPI, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from polar.assets.cache import asset, lock_tag
from polar.assets.pypi import PYTHON_TAG, install_python
from tests.waiting import eventually_sync

# Apart from this environment: its botocore asks for a python-dateutil older than ours.
LOCK = Path(__file__).parent / "fakes" / "moto_server.txt"


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """The address of a server with one empty bucket."""
    packages = asset(f"moto-server-{lock_tag(LOCK)}-{PYTHON_TAG}", partial(install_python, LOCK))
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
    request = urllib.request.Request(url, method="PUT")

    def is_made() -> bool:
        try:
            urllib.request.urlopen(request, timeout=10).close()
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            assert process.poll() is None, "the S3 server ended at once"
            return False
        return True

    eventually_sync(is_made, every=0.1)
