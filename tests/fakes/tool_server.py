"""A server of the Model Context Protocol with one tool, over standard input and output or over HTTP.

    SECRET=... python tool_server.py

The tool's answer holds the secret and the directory in which the server runs, which no model could guess.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
TOOL = {
    "name": "look_up",
    "description": "Looks a word up.",
    "inputSchema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}
METHOD_NOT_FOUND, INVALID_PARAMS = -32601, -32602


def found(word: str, secret: str, place: str) -> str:
    return f"{word} is {secret} in {place}"


def answer(message: dict[str, Any], secret: str) -> dict[str, Any] | None:
    """Return the response to a request, none to a notification."""
    if "id" not in message:
        return None
    params = message.get("params") or {}
    reply = {"jsonrpc": "2.0", "id": message["id"]}
    match message["method"]:
        case "initialize":
            asked = params.get("protocolVersion")
            version = asked if asked in VERSIONS else VERSIONS[-1]
            about = {"name": "words", "version": "1"}
            return reply | {
                "result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
            }
        case "ping":
            return reply | {"result": {}}
        case "tools/list":
            return reply | {"result": {"tools": [TOOL]}}
        case "tools/call" if params.get("name") == TOOL["name"]:
            text = found(params["arguments"]["word"], secret, os.getcwd())
            return reply | {"result": {"content": [{"type": "text", "text": text}], "isError": False}}
        case "tools/call":
            return reply | {"error": {"code": INVALID_PARAMS, "message": "no such tool"}}
        case method:
            return reply | {"error": {"code": METHOD_NOT_FOUND, "message": f"no method {method}"}}


@contextmanager
def tool_server(secret: str) -> Iterator[int]:
    """Serve over HTTP at a port of this machine, for who has the secret as a bearer token."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != f"Bearer {secret}":
                self.reply(401, b"")
            elif (reply := answer(message, secret)) is None:
                self.reply(202, b"")
            else:
                self.reply(200, json.dumps(reply).encode())

        def do_GET(self) -> None:
            self.reply(405, b"")

        do_DELETE = do_GET

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def main() -> None:
    for line in sys.stdin:
        if reply := answer(json.loads(line), os.environ["SECRET"]):
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
