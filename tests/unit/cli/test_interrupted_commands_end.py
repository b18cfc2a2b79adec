"""Ctrl-C and SIGTERM end a command in order, whether or not anybody still reads what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

WAITS = """
import asyncio
from polar.cli.interruption import until_interrupted

async def work() -> None:
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        print("ended in order", flush=True)

until_interrupted(work())
"""


def test_one_signal_is_enough_when_standard_error_is_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=writer, text=True
    ) as process:
        os.close(writer)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert said == "ended in order\n"
    assert process.returncode not in (0, -signal.SIGKILL)


GOES_ON = """
import asyncio, time
from polar.cli.interruption import until_interrupted

until_interrupted(asyncio.sleep(0))
print("ready", flush=True)
time.sleep(60)
"""


def test_what_a_command_does_afterwards_is_interrupted_as_ever() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GOES_ON], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert said.endswith("KeyboardInterrupt\n")
