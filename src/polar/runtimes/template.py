"""The process that supervisors are forked from: one a node, begun when first needed, and anew if it died."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from threading import Lock

from polar.runtimes import supervisor
from polar.runtimes.base import SandboxUnavailable
from polar.runtimes.cgroups import usable_hierarchies

SEND_SECONDS = 10.0
"""How long it may take to take an order: it does nothing but fork."""

_SOURCE = Path(supervisor.__file__)
_COMPILED = Path(cache_from_source(str(_SOURCE)))
_PROGRAM = str(_COMPILED if _COMPILED.is_file() else _SOURCE)
"""Compiled, where importing it has left it so: Python does not keep what it compiles of a script."""


class Template:
    """A running supervisor program; it ends with this process, and what it forked does too."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: int | None = None
        self._starting = Lock()

    def order(self, descriptors: list[int]) -> None:
        """Have a supervisor forked that gets these descriptors; OSError if the machine cannot."""
        with self._starting:
            if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
                self._begin()
            assert self._orders is not None
            try:
                socket.send_fds(self._orders, [b"order"], descriptors)
            except (BrokenPipeError, ConnectionResetError):
                # It was killed a moment ago.
                self._begin()
                socket.send_fds(self._orders, [b"order"], descriptors)
            except TimeoutError:
                raise SandboxUnavailable(
                    f"process {self._process and self._process.pid}, which starts commands, does not answer",
                    hint="was it stopped?",
                ) from None

    def _begin(self) -> None:
        # A control group of version 2 that is to have groups below it must be asked before it has
        # a second process.
        usable_hierarchies()
        if self._orders is not None:
            self._orders.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.wait()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(SEND_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                # Ctrl-C in a terminal is for the node alone; it ends its sandboxes in order.
                start_new_session=True,
            )
        self._owner = os.getpid()


template = Template()
