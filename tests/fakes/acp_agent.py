"""An agent of the Agent Client Protocol that asks its client for a list of things, and says what it got.

    python acp_agent.py ASKED STOP

ASKED is a JSON list of `[method, params]`; `"$terminal"` in params stands for the last terminal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

GARBLED: list[Any] = [
    [],
    {},
    {"update": None},
    {"update": {"sessionUpdate": "agent_message_chunk"}},
    {"update": {"sessionUpdate": "agent_message_chunk", "content": {"text": 1}}},
    # Agents that stream may cut a pair of surrogates in two.
    {"update": {"sessionUpdate": "agent_message_chunk", "content": {"text": "\ud83d"}}},
]


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def receive() -> dict[str, Any]:
    message: dict[str, Any] = json.loads(sys.stdin.readline())
    return message


def work(asked: list[list[Any]]) -> list[Any]:
    got: list[Any] = []
    terminal = ""
    for number, (method, params) in enumerate(asked):
        told = {name: terminal if value == "$terminal" else value for name, value in params.items()}
        send(id=number, method=method, params={"sessionId": "s", **told})
        reply = receive()
        terminal = reply.get("result", {}).get("terminalId", terminal)
        got.append(reply.get("result", reply.get("error")))
    return got


def main(asked: str, stop: str) -> None:
    print("not a message", flush=True)
    while True:
        message = receive()
        result: dict[str, Any] = {}
        match message["method"]:
            case "initialize" if stop == "locked for good":
                send(id=message["id"], result=None)
                continue
            case "initialize":
                result = {"protocolVersion": 1, "authMethods": [{"id": "key", "name": "Key"}]}
            case "session/new" if stop.startswith("locked"):
                send(id=message["id"], error={"code": -32000, "message": "Authentication required"})
                continue
            case "session/new":
                result = {} if stop == "nameless" else {"sessionId": "s"}
            case "session/prompt" if stop == "silent":
                sys.exit(0)
            case "session/prompt" if stop == "endless":
                print("x" * (2**28 + 1), flush=True)
                continue
            case "session/prompt" if stop == "reasonless":
                result = {}
            case "session/prompt" if stop == "confused":
                send(id=[], result={})
                continue
            case "session/prompt" if stop == "garbled":
                for params in GARBLED:
                    send(method="session/update", params=params)
                result = {"stopReason": stop}
            case "session/prompt" if stop == "deep":
                print("[" * 1_000_000, flush=True)
                result = {"stopReason": stop}
            case "session/prompt" if stop == "crash":
                sys.exit(3)
            case "session/prompt" if stop == "orphan":
                subprocess.Popen(["cat"])
                sys.exit(3)
            case "session/prompt" if stop == "mute":
                os.close(1)
                sys.stdin.read()
            case "session/prompt":
                said = {"asked": message["params"]["prompt"][0]["text"], "got": work(json.loads(asked))}
                chunk = {"sessionUpdate": "agent_message_chunk", "content": {"text": json.dumps(said)}}
                send(method="session/update", params={"sessionId": "s", "update": chunk})
                result = {"stopReason": stop}
        send(id=message["id"], result=result)


if __name__ == "__main__":
    main(*sys.argv[1:])
