"""A program of its own: listens on the loopback of a container's network and hands the sockets out.

Started as `python -I -S listener.py CONTROL PID PORT...`. CONTROL is a socket to whoever started it.
Neither the container nor its image need to have anything for that, and nothing of ours runs inside.
"""

from __future__ import annotations

import ctypes
import os
import sys
from _socket import AF_INET, AF_UNIX, SCM_RIGHTS, SOCK_SEQPACKET, SOCK_STREAM, SOL_SOCKET, socket

libc = ctypes.CDLL(None, use_errno=True)


def enter(pid: str, kind: str) -> None:
    """Change to a namespace of another process, unless it is ours already."""
    theirs = f"/proc/{pid}/ns/{kind}"
    if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{kind}"):
        return
    with open(theirs, "rb") as file:
        if libc.setns(file.fileno(), 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the container's {kind} namespace: {os.strerror(number)}")


def listening(port: int) -> socket:
    listener = socket(AF_INET, SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def main() -> None:
    control = socket(AF_UNIX, SOCK_SEQPACKET, 0, int(sys.argv[1]))
    try:
        # A rootless engine's network belongs to its user namespace.
        for kind in ("user", "net"):
            enter(sys.argv[2], kind)
        listeners = [listening(int(port)) for port in sys.argv[3:]]
    except OSError as error:
        control.send(f"failed {error}".encode())
        return
    descriptors = b"".join(listener.fileno().to_bytes(4, sys.byteorder) for listener in listeners)
    control.sendmsg([b"listening"], [(SOL_SOCKET, SCM_RIGHTS, descriptors)])


if __name__ == "__main__":
    main()
