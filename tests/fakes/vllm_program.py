"""A `vllm` that takes vLLM's command line and serves its health and its model, without any model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = """#!{python} -IS
import argparse, json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
directory = Path({directory!r})
plan = json.loads((directory / "plan.json").read_text())
worker = subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(600)"])
named = dict((name, value) for name, value in os.environ.items() if name.startswith("VLLM_"))
(directory / "started.json").write_text(json.dumps(dict(
    arguments=sys.argv[1:], environment=named, processes=[os.getpid(), worker.pid]
)))
for line in plan["lines"]:
    print(line, file=sys.stderr, flush=True)
time.sleep(plan["seconds"])
if plan["code"] is not None:
    sys.exit(plan["code"])
parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("model")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--served-model-name")
parser.add_argument("--max-model-len", type=int, default=2048)
asked, _others = parser.parse_known_args()
CARD = dict(id=asked.served_model_name, root=asked.model, max_model_len=asked.max_model_len)
PAGES = dict([("/health", ""), ("/v1/models", json.dumps(dict(object="list", data=[CARD])))])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = PAGES.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or "")))
        self.end_headers()
        self.wfile.write((body or "").encode())
    def log_message(self, *_words):
        pass

HTTPServer((asked.host, asked.port), Handler).serve_forever()
"""


@dataclass(frozen=True)
class FakeVllm:
    """The program lies in `directory`, which is to be on the search path."""

    directory: Path

    def plan(self, *lines: str, seconds: float = 0.0, code: int | None = None) -> None:
        """What it writes to its log, and how long it waits before it serves, or ends with the code."""
        plan = {"lines": lines, "seconds": seconds, "code": code}
        (self.directory / "plan.json").write_text(json.dumps(plan))

    @property
    def started(self) -> dict[str, Any]:
        """The arguments and variables that it was started with, and its processes."""
        found: dict[str, Any] = json.loads((self.directory / "started.json").read_text())
        return found


def fake_vllm(directory: Path) -> FakeVllm:
    program = directory / "vllm"
    program.write_text(PROGRAM.format(python=sys.executable, directory=str(directory)))
    program.chmod(0o755)
    vllm = FakeVllm(directory)
    vllm.plan()
    return vllm
