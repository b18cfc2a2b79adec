"""The filter's program, run by an interpreter of the few instructions it uses."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.runtimes.seccomp import (
    ABSENT,
    ARCHITECTURES,
    CLONE,
    FAMILIES,
    NEW_NAMESPACES,
    NUMBERS,
    ON_PROCESSES,
    SOCKET,
    UNSHARE,
    X86_ONLY,
    program,
)

ALLOWED = 0
MACHINES = list(ARCHITECTURES)


def verdict(
    machine: str, number: int, first: int = 0, second: int = 0, architecture: int | None = None
) -> int:
    """0 if the kernel would let the call pass, else the error it answers with."""
    filter_ = program(machine)
    assert filter_ is not None
    data = struct.pack("=IIQQQ", number, architecture or ARCHITECTURES[machine], 0, first, second)
    steps = list(struct.iter_unpack("=HBBI", filter_))
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = steps[position]
        position += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x15:
                position += if_true if accumulator == value else if_false
            case 0x35:
                position += if_true if accumulator >= value else if_false
            case 0x45:
                position += if_true if accumulator & value else if_false
            case 0x06:
                return ALLOWED if value == 0x7FFF0000 else value & 0xFFFF
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize("machine", MACHINES)
def test_refused_calls_are_refused_and_absent_ones_absent(machine: str) -> None:
    column = MACHINES.index(machine)
    assert {verdict(machine, numbers[column]) for numbers in NUMBERS.values()} == {errno.EPERM}
    assert {verdict(machine, numbers[column]) for numbers in ABSENT.values()} == {errno.ENOSYS}


@given(st.sampled_from(MACHINES), st.integers(0, 600), st.integers(0, 2**31))
def test_every_other_call_passes(machine: str, number: int, first: int) -> None:
    column = MACHINES.index(machine)
    on_processes = [numbers for numbers, _ in ON_PROCESSES.values()]
    known = (*NUMBERS.values(), *ABSENT.values(), *on_processes, CLONE, UNSHARE, SOCKET)
    special = {numbers[column] for numbers in known}
    if number in special or (machine == "x86_64" and number in X86_ONLY.values()):
        return
    assert verdict(machine, number, first) == ALLOWED


@given(st.sampled_from(MACHINES), st.sampled_from([CLONE, UNSHARE]), st.integers(0, 2**32 - 1))
def test_no_namespace_can_be_made(machine: str, call: tuple[int, int], flags: int) -> None:
    expected = errno.EPERM if flags & NEW_NAMESPACES else ALLOWED
    assert verdict(machine, call[MACHINES.index(machine)], flags) == expected


@given(
    st.sampled_from(MACHINES),
    st.sampled_from(sorted(ON_PROCESSES)),
    st.integers(0, 2**31),
    st.integers(0, 99),
)
def test_the_first_process_is_out_of_reach_and_no_other(
    machine: str, call: str, process: int, other: int
) -> None:
    numbers, argument = ON_PROCESSES[call]
    number = numbers[MACHINES.index(machine)]
    for target in (process, 1):
        arguments = (target, other) if argument == 0 else (other, target)
        assert verdict(machine, number, *arguments) == (errno.EPERM if target == 1 else ALLOWED)


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_can_be_made(machine: str) -> None:
    assert verdict(machine, CLONE[MACHINES.index(machine)], 0x3D0F00) == ALLOWED


@pytest.mark.parametrize("machine", MACHINES)
def test_only_known_families_of_sockets(machine: str) -> None:
    number = SOCKET[MACHINES.index(machine)]
    passing = {family for family in range(64) if verdict(machine, number, family) == ALLOWED}
    assert passing == set(FAMILIES)


def test_calls_of_another_architecture_are_absent() -> None:
    assert verdict("x86_64", 21, architecture=0x40000003) == errno.ENOSYS
    assert verdict("x86_64", 0x40000000 + 165) == errno.ENOSYS
    assert verdict("aarch64", 21, architecture=0x40000028) == errno.ENOSYS


def test_an_unknown_processor_has_no_filter() -> None:
    assert program("riscv64") is None
