"""The actor on each machine: its child is `polar node`, which lives and drains as one by hand does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.app.fleet.planning import NodeState

END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node's actor says of its child."""

    machine: str
    host: str
    state: NodeState
    seconds: float
    was_asked: bool
    detail: str | None = None


class NodeHost:
    """Starts the node when it is made; whoever ends this process ends the node with it."""

    def __init__(self, machine: str, host: str, settings: dict[str, Any]) -> None:
        self._place = machine, host
        data_dir = Path(settings["data_dir"]).expanduser()
        self._log = data_dir / "logs" / f"{settings['node']['name']}.log"
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state = NodeState.STARTING
        self._since = time.monotonic()
        self._was_asked = False
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "polar", "node", "--config", "-", "--exit-with-parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=data_dir,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        # Not by arguments or environment: other processes of this user could read them there.
        with self._process.stdin as stdin:
            stdin.write(json.dumps({**settings, "data_dir": str(data_dir)}))
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self) -> NodeReport:
        code = self._process.poll()
        if code is not None and self._state is not NodeState.ENDED:
            self._enter(NodeState.ENDED)
        seconds = time.monotonic() - self._since
        reason = None if code is None else self._reason(code)
        return NodeReport(*self._place, self._state, seconds, self._was_asked, reason)

    def drain(self) -> None:
        """Ask the node to end when its sessions have; asking again changes nothing."""
        if self._was_asked or self._process.poll() is not None:
            return
        self._was_asked = True
        self._enter(NodeState.DRAINING)
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End the node now; its sessions are taken from it when their leases expire."""
        self._was_asked = True
        self._process.kill()
        self._process.wait(END_SECONDS)

    def _enter(self, state: NodeState) -> None:
        self._state, self._since = state, time.monotonic()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready as ") and self._state is NodeState.STARTING:
                self._enter(NodeState.READY)

    def _reason(self, code: int) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1].removeprefix("error: ") if lines else "it said nothing"
        return f"exit code {code}: {said}"[:500]
