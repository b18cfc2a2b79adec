"""A client of the Agent Client Protocol, run inside the sandbox by its Python, without other packages.

    python acp_client.py SETTINGS COMMAND [ARGUMENT...]

Starts the command, opens a session in the working directory, sends what it reads on standard input as the one
prompt, answers what the agent asks, and prints what the agent says. SETTINGS is a file with a JSON object:
`auth`, `mode` and `mcpServers`. The exit code is 0 if the agent says that its turn has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
LONGEST_LINE = 2**28
LONGEST_OUTPUT = 2**20
END_SECONDS = 5
REST_SECONDS = 1
"""How long what a program has printed is read on after its end, if others hold its output open."""
PREFERRED = ("allow_always", "allow_once")
CAPABILITIES = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": True}
METHOD_NOT_FOUND, INTERNAL_ERROR, AUTHENTICATION_REQUIRED = -32601, -32603, -32000


class Refused(Exception):
    """A request that was answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Streams(asyncio.subprocess.SubprocessStreamProtocol):
    """The streams of a program, whose end is told though programs that it started hold them open."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set()


async def start(
    *command: str, limit: int = 2**16, **options: Any
) -> tuple[asyncio.subprocess.Process, asyncio.Event]:
    """Run a program; return it with what is set at its end."""
    loop = asyncio.get_running_loop()
    transport, streams = await loop.subprocess_exec(lambda: Streams(limit), *command, **options)
    return asyncio.subprocess.Process(transport, streams, loop), streams.ended


@dataclass
class Terminal:
    """One command that the agent has started, with what it has printed so far."""

    process: asyncio.subprocess.Process
    ended: asyncio.Event
    limit: int
    output: bytes = b""
    is_truncated: bool = False
    reading: asyncio.Task[None] | None = None

    async def read(self) -> None:
        assert self.process.stdout is not None
        while part := await self.process.stdout.read(65_536):
            self.output += part
            if len(self.output) > self.limit:
                self.output = self.output[len(self.output) - self.limit :]
                self.is_truncated = True

    async def wait(self) -> None:
        """Wait for the command's end, and for what it has printed."""
        assert self.reading is not None
        await self.ended.wait()
        await asyncio.wait({self.reading}, timeout=REST_SECONDS)

    def kill(self) -> None:
        """End the command with everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def exit_status(self) -> dict[str, Any] | None:
        code = self.process.returncode
        if code is None:
            return None
        return {
            "exitCode": code if code >= 0 else None,
            "signal": signal.Signals(-code).name if code < 0 else None,
        }


@dataclass
class AcpClient:
    """One connection to an agent, and what it may ask of us."""

    agent: asyncio.subprocess.Process
    ended: asyncio.Event
    workspace: Path
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    terminals: dict[str, Terminal] = field(default_factory=dict)
    working: set[asyncio.Task[None]] = field(default_factory=set)
    at_line_start: bool = True

    async def ask(self, method: str, **params: Any) -> Any:
        """Send a request and return its result."""
        number = len(self.answers)
        self.answers[number] = asyncio.get_running_loop().create_future()
        await self._send({"id": number, "method": method, "params": params})
        return await self.answers[number]

    async def ask_for(self, field: str, method: str, **params: Any) -> str:
        """Send a request and return one field of its result."""
        match await self.ask(method, **params):
            case dict() as result if isinstance(value := result.get(field), str):
                return value
        raise Refused(INTERNAL_ERROR, f"the agent answered {method} without {field}")

    async def listen(self) -> None:
        """Take what the agent sends until it ends; whoever still waits is told why."""
        reading, ending = asyncio.create_task(self._read()), asyncio.create_task(self.ended.wait())
        both = {reading, ending}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(both, timeout=REST_SECONDS)
        why = "the agent closed its output"
        if reading.done() and (wrong := reading.result()):
            why = wrong
        elif self.ended.is_set():
            why = f"the agent ended with exit code {self.agent.returncode}"
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(Refused(INTERNAL_ERROR, why))

    async def _read(self) -> str | None:
        """Take what the agent sends; return what was wrong, None if it closed its output."""
        assert self.agent.stdout is not None
        try:
            while line := await self.agent.stdout.readline():
                self._take(line)
        except ValueError:
            return "a line of the agent's output is too long"
        except (TypeError, AttributeError) as error:
            return f"a message of the agent is not understood: {error}"
        return None

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            print(line.decode(errors="replace").rstrip(), file=sys.stderr)
        elif "method" not in message:
            self._settle(message)
        elif "id" in message:
            task = asyncio.create_task(self._answer(message))
            self.working.add(task)
            task.add_done_callback(self.working.discard)
        elif message["method"] == "session/update":
            match message.get("params"):
                case {"update": dict() as update}:
                    self._show(update)

    def _settle(self, message: dict[str, Any]) -> None:
        answer = self.answers.get(message.get("id", -1))
        if answer is None or answer.done():
            return
        if error := message.get("error"):
            about = f": {json.dumps(error['data'])}" if error.get("data") else ""
            answer.set_exception(Refused(error.get("code", 0), f"{error.get('message')}{about}"))
        else:
            answer.set_result(message.get("result"))

    async def _answer(self, message: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": message["id"]}
        try:
            answer = REQUESTS.get(message["method"])
            if answer is None:
                raise Refused(METHOD_NOT_FOUND, f"{message['method']} is not supported")
            reply["result"] = await answer(self, message.get("params") or {})
        except Refused as error:
            reply["error"] = {"code": error.code, "message": str(error)}
        except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
            reply["error"] = {"code": INTERNAL_ERROR, "message": f"{type(error).__name__}: {error}"}
        await self._send(reply)

    async def _send(self, message: dict[str, Any]) -> None:
        assert self.agent.stdin is not None
        # An agent that has ended is told of by `listen`.
        with suppress(ConnectionError):
            self.agent.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            await self.agent.stdin.drain()

    def _show(self, update: dict[str, Any]) -> None:
        kind, content = update.get("sessionUpdate"), update.get("content")
        text = content.get("text") if isinstance(content, dict) else None
        if kind == "agent_message_chunk" and text and isinstance(text, str):
            print(text, end="", flush=True)
            self.at_line_start = text.endswith("\n")
        elif kind == "tool_call":
            print("" if self.at_line_start else "\n", f"[{update.get('title')}]", sep="", flush=True)
            self.at_line_start = True

    async def permit(self, params: dict[str, Any]) -> dict[str, Any]:
        """Allow what is asked for, for good where that is offered."""
        offered = {option.get("kind"): option["optionId"] for option in reversed(params["options"])}
        for kind in PREFERRED:
            if kind in offered:
                return {"outcome": {"outcome": "selected", "optionId": offered[kind]}}
        return {"outcome": {"outcome": "cancelled"}}

    async def read_file(self, params: dict[str, Any]) -> dict[str, Any]:
        path = self._inside(params["path"])
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            lines = file.readlines()
        first = max((params.get("line") or 1) - 1, 0)
        limit = params.get("limit")
        return {"content": "".join(lines[first : None if limit is None else first + limit])}

    async def write_file(self, params: dict[str, Any]) -> dict[str, Any]:
        path = self._inside(params["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(params["content"].encode())
        return {}

    def _inside(self, path: str) -> Path:
        place = (self.workspace / path).resolve()
        if not place.is_relative_to(self.workspace):
            raise Refused(INTERNAL_ERROR, f"{path} is outside the workspace")
        return place

    async def create_terminal(self, params: dict[str, Any]) -> dict[str, Any]:
        # Agents send a whole command line where there are no arguments.
        alone: list[str] = ["/bin/sh", "-c", params["command"]]
        command: list[str] = [params["command"], *params["args"]] if params.get("args") else alone
        own = [f"{variable['name']}={variable['value']}" for variable in params.get("env") or ()]
        process, ended = await start(
            *(("env", "--", *own) if own else ()),
            *command,
            cwd=self._inside(params.get("cwd") or "."),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        terminal = Terminal(process, ended, params.get("outputByteLimit") or LONGEST_OUTPUT)
        terminal.reading = asyncio.create_task(terminal.read())
        name = f"terminal-{process.pid}"
        self.terminals[name] = terminal
        return {"terminalId": name}

    async def terminal_output(self, params: dict[str, Any]) -> dict[str, Any]:
        terminal = self.terminals[params["terminalId"]]
        told = {"output": terminal.output.decode(errors="ignore"), "truncated": terminal.is_truncated}
        return told | ({"exitStatus": status} if (status := terminal.exit_status) else {})

    async def wait_for_exit(self, params: dict[str, Any]) -> dict[str, Any]:
        terminal = self.terminals[params["terminalId"]]
        await terminal.wait()
        return terminal.exit_status or {}

    async def kill_terminal(self, params: dict[str, Any]) -> dict[str, Any]:
        self.terminals[params["terminalId"]].kill()
        return {}

    async def release_terminal(self, params: dict[str, Any]) -> dict[str, Any]:
        self.terminals.pop(params["terminalId"]).kill()
        return {}


REQUESTS: dict[str, Callable[[AcpClient, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "session/request_permission": AcpClient.permit,
    "fs/read_text_file": AcpClient.read_file,
    "fs/write_text_file": AcpClient.write_file,
    "terminal/create": AcpClient.create_terminal,
    "terminal/output": AcpClient.terminal_output,
    "terminal/wait_for_exit": AcpClient.wait_for_exit,
    "terminal/kill": AcpClient.kill_terminal,
    "terminal/release": AcpClient.release_terminal,
}


@asynccontextmanager
async def connected(command: list[str]) -> AsyncIterator[AcpClient]:
    """Run the agent during the block."""
    pipe = asyncio.subprocess.PIPE
    agent, ended = await start(*command, stdin=pipe, stdout=pipe, stderr=None, limit=LONGEST_LINE)
    client = AcpClient(agent, ended, Path.cwd().resolve())
    listening = asyncio.create_task(client.listen())
    try:
        yield client
    finally:
        for terminal in client.terminals.values():
            terminal.kill()
        with suppress(ProcessLookupError):
            agent.terminate()
        _, waiting = await asyncio.wait({listening}, timeout=END_SECONDS)
        if waiting:
            with suppress(ProcessLookupError):
                agent.kill()
            listening.cancel()


async def open_session(client: AcpClient, settings: dict[str, Any]) -> str:
    """Return the name of a new session, authenticated if the agent asks for that."""
    about = {"name": "polar", "title": "Polar", "version": "1"}
    agent = await client.ask(
        "initialize", protocolVersion=VERSION, clientCapabilities=CAPABILITIES, clientInfo=about
    )
    if settings.get("auth"):
        await client.ask("authenticate", methodId=settings["auth"])
    wanted = {"cwd": str(client.workspace), "mcpServers": settings.get("mcpServers", [])}
    try:
        name = await client.ask_for("sessionId", "session/new", **wanted)
    except Refused as error:
        match agent:
            case {"authMethods": [*methods]} if error.code == AUTHENTICATION_REQUIRED:
                names = ", ".join(str(method.get("id")) for method in methods if isinstance(method, dict))
                raise Refused(error.code, f"{error} (options.auth may be one of: {names})") from None
        raise
    if settings.get("mode"):
        await client.ask("session/set_mode", sessionId=name, modeId=settings["mode"])
    return name


async def main(settings: dict[str, Any], command: list[str]) -> int:
    text = sys.stdin.buffer.read().decode()
    # Agents that stream may cut a character in two.
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    try:
        async with connected(command) as client:
            session = await open_session(client, settings)
            prompt = [{"type": "text", "text": text}]
            reason = await client.ask_for("stopReason", "session/prompt", sessionId=session, prompt=prompt)
    except (Refused, OSError) as error:
        print(f"\nthe agent failed: {error}", file=sys.stderr)
        return 1
    print(f"\nthe turn ended: {reason}", file=sys.stderr)
    return int(reason != "end_turn")


if __name__ == "__main__":
    sys.exit(asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:])))
