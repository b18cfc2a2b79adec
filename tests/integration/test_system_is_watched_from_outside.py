"""A whole system on a real engine, as its operator sees it: `/metrics`, `polar top`, `polar doctor`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar.app.stack import Stack, running
from polar.client import AsyncClient
from polar.config.settings import EngineSettings, NodeSettings, ServerSettings, Settings, TelemetrySettings
from polar.engines.embedded.model import load
from polar.engines.embedded.server import EmbeddedServer
from polar.models.access import TokenRole
from polar.telemetry.readings import read
from tests.fakes.tiny_llama import write_tiny_llama
from tests.systems import ASK, RUNTIMES, shell_task

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("model")]


@asynccontextmanager
async def small_system(tmp_path: Path) -> AsyncIterator[tuple[Stack, str, list[str]]]:
    """A system that has run a task twice, its engine's URL, and what it said while it started."""
    model = write_tiny_llama(tmp_path / "tiny")
    said: list[str] = []
    async with EmbeddedServer(load(EngineSettings(model=str(model), device="cpu", slots=2))) as engine:
        settings = Settings(
            data_dir=tmp_path / "data",
            server=ServerSettings(port=0),
            engine=EngineSettings(url=engine.url, model=str(model)),
            node=NodeSettings(run_slots=2, runtimes=RUNTIMES),
            telemetry=TelemetrySettings(metrics_port=0),
        )
        async with running(settings, said.append) as stack:
            async with AsyncClient(stack.url, stack.token) as client:
                await client.submit(shell_task("seen", ASK, samples=2, sampling={"max_tokens": 4}))
                await client.wait(["seen"], timeout=60)
            yield stack, engine.url, said


async def polar(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "polar", *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.splitlines()]


async def test_page_top_and_doctor_agree_on_a_running_system(tmp_path: Path) -> None:
    async with small_system(tmp_path) as (stack, engine_url, said), httpx.AsyncClient() as http:
        page = (await http.get(f"{stack.url}/metrics")).text
        node_page = next(line.split()[-1] for line in said if line.startswith("metrics at "))
        apart = (await http.get(node_page)).text
        async with AsyncClient(stack.url, stack.token) as client:
            made = await client.create_token("watcher", TokenRole.READ_ONLY)
        watching = ("top", "--once", "--interval", "0.2", "--json", "--server", stack.url)
        reader = tmp_path / "reader.token"
        reader.write_text(made.token)
        (code, (vitals,)) = await polar(*watching, "--token-file", str(reader))
        model = str(tmp_path / "tiny")
        doctor_code, findings = await polar("doctor", "--engine", engine_url, "--model", model, "--json")
    assert f'polar_engine_up{{engine="{engine_url}"}} 1.0' in page
    assert f'polar_engine_prompt_tokens_total{{engine="{engine_url}"}}' in page
    readings = read(page)
    assert readings.cached_tokens
    assert readings.sampled_tokens
    assert 'polar_gateway_call_seconds_count{dialect="openai_chat"} 2.0' in page
    assert "polar_node_sessions_ended_total" in apart
    assert "polar_server_" not in apart
    assert code == 0
    assert vitals["sessions"]["completed"] == 2
    assert [node["name"] for node in vitals["nodes"]] == ["local"]
    assert {pool["name"]: pool["size"] for pool in vitals["pools"]}["run"] == 2
    assert [engine["is_up"] for engine in vitals["engines"]] == [True]
    assert 0 < vitals["engines"][0]["prefix_hits"] < 1
    found = {(finding["area"], finding["name"]): finding for finding in findings}
    problems = [finding for finding in findings if finding["level"] == "problem"]
    assert doctor_code == (1 if problems else 0)
    for name in (
        "reachable",
        "logprobs",
        "tokens",
        "weight updates",
        "tokenizer",
        "streaming",
        "token drift",
    ):
        assert found["engine", name]["level"] == "ok", found["engine", name]
    assert all(finding["fix"] for finding in problems)
    # An engine that is named is the only one: nothing is said of those that Polar could start.
    assert not {name for _, name in found} & {"embedded engine", "vLLM"}
