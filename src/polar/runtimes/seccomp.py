"""A seccomp filter for system calls that no sandboxed program needs.

It lists what is refused rather than what is allowed, since agents run any program: calls that create
namespaces and mounts, reach into the kernel, or bypass the network namespace.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable
from functools import cache

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

NUMBERS: dict[str, tuple[int, int]] = {
    # name: (x86_64, aarch64)
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "userfaultfd": (323, 282),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "syslog": (103, 116),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
}
X86_ONLY = {"iopl": 172, "ioperm": 173, "uselib": 134, "ustat": 136, "sysfs": 139, "modify_ldt": 154}

ABSENT: dict[str, tuple[int, int]] = {
    # Answered as by a kernel without them, for which every program has a fallback. The
    # flags of clone3 are behind a pointer, where a filter cannot look.
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}

ON_PROCESSES: dict[str, tuple[tuple[int, int], int]] = {
    # name: (numbers, which argument is the process)
    "ptrace": ((101, 117), 1),
    "process_vm_readv": ((310, 270), 0),
    "process_vm_writev": ((311, 271), 0),
    "pidfd_open": ((434, 434), 0),
}
"""Refused for the sandbox's first process, whose memory decides how the others' end is reported."""
FIRST_PROCESS = 1

CLONE, UNSHARE, SOCKET = (56, 220), (272, 97), (41, 198)
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID and NET."""
FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6 and netlink; others, above all vsock, bypass network namespaces."""


@cache
def program(machine: str | None = None) -> bytes | None:
    """Return the filter in the kernel's format; None for processors whose system calls are unknown here."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    refused = [numbers[column] for numbers in NUMBERS.values()]
    if machine == "x86_64":
        refused += X86_ONLY.values()
    steps = [
        _load(_ARCHITECTURE_AT),
        _op(_JUMP_EQUAL, ARCHITECTURES[machine], 1, 0) + _refuse(errno.ENOSYS),
        _load(_NUMBER_AT),
    ]
    if machine == "x86_64":
        # The x32 ABI: the same calls under other numbers.
        steps.append(_op(_JUMP_AT_LEAST, 0x40000000, 0, 1) + _refuse(errno.ENOSYS))
    steps += [_if_equal(number, [_refuse(errno.EPERM)]) for number in refused]
    steps += [_if_equal(numbers[column], [_refuse(errno.ENOSYS)]) for numbers in ABSENT.values()]
    for on_process, argument in ON_PROCESSES.values():
        first = [_load(_ARGUMENT_AT + 8 * argument), _if_equal(FIRST_PROCESS, [_refuse(errno.EPERM)])]
        steps.append(_if_equal(on_process[column], [*first, _op(_RETURN, _ALLOW)]))
    for numbers in (CLONE, UNSHARE):
        flags = [
            _load(_ARGUMENT_AT),
            _op(_JUMP_ANY_BIT, NEW_NAMESPACES, 0, 1),
            _refuse(errno.EPERM),
            _op(_RETURN, _ALLOW),
        ]
        steps.append(_if_equal(numbers[column], flags))
    family = [_load(_ARGUMENT_AT), *(_if_equal(known, [_op(_RETURN, _ALLOW)]) for known in FAMILIES)]
    steps.append(_if_equal(SOCKET[column], [*family, _refuse(errno.EAFNOSUPPORT)]))
    steps.append(_op(_RETURN, _ALLOW))
    return b"".join(steps)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _load(offset: int) -> bytes:
    return _op(_LOAD, offset)


def _refuse(number: int) -> bytes:
    return _op(_RETURN, _REFUSE | number)


def _if_equal(value: int, then: Iterable[bytes]) -> bytes:
    body = b"".join(then)
    return _op(_JUMP_EQUAL, value, 0, len(body) // 8) + body
