"""A group of a trainer and an engine's workers over plain sockets, in the place of NCCL's.

As NCCL, it waits for ever for a member that does not come or has gone, until it is left.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Event
from typing import Any


class SocketGroup:
    made: list[SocketGroup]
    """All of a test, which sets it."""

    def __init__(self, store: socket.socket, members: int, device: Any) -> None:
        self.has_left = Event()
        self.sends = 0
        self.made.append(self)
        with store:
            self._others = [store.accept()[0] for _ in range(members - 1)]

    def send(self, tensors: Sequence[Any]) -> None:
        self.sends += 1
        try:
            for tensor in tensors:
                assert tensor.is_contiguous()
                for other in self._others:
                    other.sendall(tensor.numpy().tobytes())
            # The engine tells that it has all of them.
            for other in self._others:
                if not other.recv(1):
                    raise ConnectionError
        except OSError:
            self.has_left.wait()
            raise

    def leave(self) -> None:
        self.has_left.set()
        for other in self._others:
            with suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
            other.close()
