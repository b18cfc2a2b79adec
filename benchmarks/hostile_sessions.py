"""Memory of a node while its sessions send what should hurt it, against as many that do their work.

Each measurement is a process of its own, which holds server, node and gateway: `python -m
benchmarks.hostile_sessions hostile` prints its peak in MiB.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import Row
from tests.systems import shell_task, system

SESSIONS = 12
TURNS = 20
MAX_CONTEXT = 131_072
_COMMON = """
import gzip, json, os, socket, threading, urllib.parse
at = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
model = os.environ["POLAR_MODEL"]
def send(*pieces, more="", missing=0):
    length = sum(len(piece) * times for piece, times in pieces) + missing
    path, key = at.path + "/chat/completions", os.environ["OPENAI_API_KEY"]
    head = (f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\n"
            f"Content-Length: {length}\\r\\nConnection: close\\r\\n{more}\\r\\n")
    try:
        with socket.create_connection((at.hostname, at.port), 120) as wire:
            wire.sendall(head.encode())
            for piece, times in pieces:
                for _ in range(times):
                    wire.sendall(piece)
            while wire.recv(65536):
                pass
    except OSError:
        pass
"""
_HONEST = f"""
import random
words = random.Random(os.environ["OPENAI_API_KEY"])
messages = [{{"role": "system", "content": "You are an agent. " * 2500}}]
for turn in range({TURNS}):
    said = " ".join(words.choice(("alpha", "beta", "gamma", "delta")) for _ in range(2000))
    messages.append({{"role": "user", "content": said}})
    send((json.dumps({{"model": model, "messages": messages}}).encode(), 1))
    messages.append({{"role": "assistant", "content": "Hello."}})
print("done", file=open("answer.txt", "w"))
"""
_HOSTILE = """
MB = 1 << 20
start, end = f'{{"model": "{model}", "messages": ['.encode(), b']}'
said, unsaid = start + b'{"role": "user", "content": "', b'"}' + end
bomb = gzip.compress(said + b"x" * 30 * MB + unsaid)
attacks = [
    lambda: send((bomb, 1), more="Content-Encoding: gzip\\r\\n"),
    lambda: send((said, 1), (b"x" * MB, 30), (unsaid, 1)),
    lambda: send((said, 1), (b"a " * MB, 1), (unsaid, 1)),
    lambda: send((start, 1), (b"{}," * MB, 8), (b"{}" + end, 1)),
    lambda: send((b"[" * MB, 30)),
    lambda: send((b" " * MB, 30), missing=MB),
]
threads = [threading.Thread(target=attack) for attack in attacks for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done", file=open("answer.txt", "w"))
"""
_AGENTS = {"honest": _COMMON + _HONEST, "hostile": _COMMON + _HOSTILE}


def memory_row() -> Row:
    honest, hostile = (_peak_of(kind) for kind in ("honest", "hostile"))
    what = f"peak memory of a node, {SESSIONS} hostile sessions (peer: {SESSIONS} honest ones)"
    return Row(what, hostile, "MiB", honest, "≤ 2 × peer", hostile <= 2 * honest)


def _peak_of(kind: str) -> float:
    command = [sys.executable, "-m", "benchmarks.hostile_sessions", kind]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


async def _run(kind: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with system(Path(directory), ["Hello."], max_context=MAX_CONTEXT) as running:
            agent = f"{sys.executable} - <<'AGENT'\n{_AGENTS[kind]}\nAGENT"
            task = shell_task(kind, agent, samples=SESSIONS)
            await running.client.submit(task)
            async with running.node(run_slots=SESSIONS):
                await running.client.wait([task.id], timeout=1200)


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
