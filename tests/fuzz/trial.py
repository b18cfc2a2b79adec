"""A run of the fuzzer: a whole system in this process, malformed requests, and what must never happen."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL, GatewaySettings, ServerSettings
from polar.engines.embedded.weights import ensure_model
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.task import Budgets, SamplingPin
from polar.rendering.families import renderer_for
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fuzz.exchange import BrokenAnswer, Connection, Reply
from tests.fuzz.targets import ControlPlaneTarget, GatewayTarget, Target
from tests.systems import TOKEN, shell_task

CONCURRENT = 8
HANGS_AFTER_SECONDS = 60.0
_A_SESSION = 2_000
"""Requests after which the gateway's session is another: what one remembers does not slow the run down."""
_SETTINGS = GatewaySettings(
    max_failed_calls=10**9, max_body_bytes=1 << 20, body_seconds=2.0, head_seconds=5.0
)


_PARSER_S_OWN = b"Invalid HTTP request received."
"""How uvicorn answers what is not HTTP, before any route is known. Pages are for who accepts them."""


@dataclass
class Findings:
    """What a run has seen."""

    faults: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, fault: str) -> None:
        if len(self.faults) < 50:
            self.faults.append(fault)


async def trial(data_dir: Path, *, seed: int, requests: int) -> Findings:
    """Send half of the requests to a gateway and half to a control plane; what was wrong with the answers."""
    findings = Findings()
    began = time.monotonic()
    with _logged_errors(findings):
        await _fuzz_gateway(data_dir, seed, requests // 2, findings)
        await _fuzz_control_plane(data_dir, seed, requests - requests // 2, findings)
    findings.seconds = time.monotonic() - began
    return findings


async def _fuzz_gateway(data_dir: Path, seed: int, requests: int, findings: Findings) -> None:
    model = ensure_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    engine = ScriptedEngine(tokenizer, ["Hello."], repeat_last=True)
    renderer = renderer_for("x", model, tool_prompt=True)
    async with Gateway(_SETTINGS, engine, renderer, engine.info) as gateway:
        for first in range(0, requests, _A_SESSION):
            grant = SessionGrant(
                f"s{first}", new_key(), data_dir / f"{first}.capture", SamplingPin(), Budgets()
            )
            gateway.open_session(grant)
            numbers = range(first, min(first + _A_SESSION, requests))
            await _fuzz(GatewayTarget(grant.key), gateway.host, gateway.port, seed, numbers, findings)
            await _check(f"http://{gateway.host}:{gateway.port}/v1/models", grant.key, findings)
            await gateway.close_session(grant.session_id)
            engine.requests.clear()
            grant.capture.unlink()


async def _fuzz_control_plane(data_dir: Path, seed: int, requests: int, findings: Findings) -> None:
    async with (
        Store.open(data_dir) as store,
        RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
        httpx.AsyncClient() as http,
    ):
        openapi = (
            await http.get(f"{server.url}/api/v1/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
        ).json()
        task = shell_task("t", "true").model_dump(mode="json")
        target = ControlPlaneTarget(openapi, TOKEN, task)
        at = urlsplit(server.url)
        await _fuzz(target, at.hostname or "", at.port or 0, seed, range(requests), findings)
        await _check(f"{server.url}/api/v1/health", TOKEN, findings)


async def _fuzz(target: Target, host: str, port: int, seed: int, numbers: range, findings: Findings) -> None:
    left = iter(numbers)

    async def client() -> None:
        connection = Connection(host, port)
        for number in left:
            await _send(target, connection, seed, number, findings)
        connection.close()

    await asyncio.gather(*(client() for _ in range(CONCURRENT)))


async def _send(target: Target, connection: Connection, seed: int, number: int, findings: Findings) -> None:
    wire = target.request(seed, number)
    try:
        async with asyncio.timeout(HANGS_AFTER_SECONDS):
            reply = await connection.exchange(wire)
        fault = _fault(reply, wire.method) if reply else None
        findings.statuses[f"{type(target).__name__} {reply.status if reply else 'closed'}"] += 1
    except TimeoutError:
        connection.close()
        fault = "no answer"
    except (BrokenAnswer, ValueError, asyncio.LimitOverrunError) as error:
        connection.close()
        fault = f"a broken answer: {error!r}"
    if fault:
        findings.add(f"{type(target).__name__} {seed}/{number}: {fault}\n    {wire.data[:600]!r}")


def _fault(reply: Reply, method: str) -> str | None:
    if reply.status >= 500:
        return f"{reply.status}: {reply.body[:300]!r}"
    if reply.status >= 400 and method != "HEAD":
        if reply.body == _PARSER_S_OWN or reply.headers.get("content-type", "").startswith("text/html"):
            return None
        try:
            told = json.loads(reply.body)
        except ValueError:
            return f"{reply.status} is not told in JSON: {reply.body[:300]!r}"
        if not isinstance(told, dict) or told.keys().isdisjoint({"error", "message"}):
            return f"{reply.status} without an error: {reply.body[:300]!r}"
    return None


async def _check(url: str, token: str, findings: Findings) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(url, headers={"Authorization": f"Bearer {token}"})
    if answer.status_code != 200:
        findings.add(f"{url} answers {answer.status_code} afterwards")


@contextmanager
def _logged_errors(findings: Findings) -> Iterator[None]:
    """Whatever is logged as an error or with a traceback is a fault."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info or record.levelno >= logging.ERROR:
                findings.add(f"logged: {self.format(record)}")

    listener = Listener()
    logging.getLogger().addHandler(listener)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(listener)
