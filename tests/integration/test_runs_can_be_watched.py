"""A real run, watched: metrics scraped from the server's page, spans received by an OTLP collector."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from polar.config.settings import TelemetrySettings
from polar.models.session import SessionResult
from polar.telemetry.page import PATH
from polar.telemetry.tracing import exporting
from tests.fakes.otlp_collector import Collector, collecting
from tests.systems import ASK, System, shell_task, system

SAID = "Forty-two, of course."
ASKED = "Say something."
TWICE = ASK + ASK


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


async def run_watched(tmp_path: Path) -> tuple[Collector, SessionResult]:
    async with collecting() as collector, system(tmp_path, [SAID]) as whole:
        await whole.client.submit(shell_task("seen", TWICE))
        settings = TelemetrySettings(traces=collector.url)
        async with exporting(settings, {"service.instance.id": "local"}), whole.node():
            (result,) = await whole.client.wait(["seen"], timeout=60)
    return collector, result


async def test_a_session_is_a_trace_of_stages_and_completions(tmp_path: Path) -> None:
    collector, result = await run_watched(tmp_path)
    spans = {span.span_id: span for span in collector.spans}
    named = {span.name: span for span in spans.values()}
    (root,) = [span for span in spans.values() if not span.parent_span_id]
    assert root.name == "invoke_agent shell"
    seen = attributes(root)
    assert seen["gen_ai.operation.name"] == "invoke_agent"
    assert seen["polar.session.id"] == seen["gen_ai.conversation.id"] == result.session_id
    assert (seen["polar.task.id"], seen["polar.status"]) == ("seen", "completed")
    assert seen["gen_ai.evaluation.score.value"] == result.reward == 1.0
    assert seen["polar.tokens.trainable"] == result.stats.trainable_tokens > 0
    stages = [named[stage] for stage in ("init", "ready", "running", "postrun")]
    assert {spans[stage.parent_span_id].name for stage in stages} == {root.name}
    assert [stage.start_time_unix_nano for stage in stages] == sorted(s.start_time_unix_nano for s in stages)
    calls = [span for span in spans.values() if span.name == "chat scripted"]
    assert len(calls) == result.stats.completions == 2
    for call in calls:
        assert spans[call.parent_span_id].name == "running"
        assert call.trace_id == root.trace_id
        said = attributes(call)
        assert said["gen_ai.operation.name"] == "chat"
        assert said["gen_ai.request.model"] == "scripted"
        assert said["gen_ai.usage.output_tokens"] * 2 == result.stats.sampled_tokens
        assert said["gen_ai.usage.input_tokens"] > 0
        assert [value.string_value for value in said["gen_ai.response.finish_reasons"].values] == ["stop"]
        assert said["polar.dialect"] == "openai_chat"
        assert root.start_time_unix_nano <= call.start_time_unix_nano <= call.end_time_unix_nano
    # Nothing that was asked or answered has left.
    assert SAID.encode() not in collector.raw
    assert ASKED.encode() not in collector.raw


async def test_the_page_counts_what_the_run_did(tmp_path: Path) -> None:
    async with system(tmp_path, [SAID]) as whole, whole.node() as node:
        with whole.server.page.showing(node.metric_families, whole.gateway.metric_families):
            await whole.client.submit(shell_task("counted", TWICE, samples=2))
            results = await whole.client.wait(["counted"], timeout=60)
            # A result is there for readers a moment before its node hears so.
            async with asyncio.timeout(30):
                while (page := await scraped(whole)).get(("polar_node_deliveries_total", "stored")) != 2:
                    pass
    sampled = sum(result.stats.sampled_tokens for result in results)
    assert page["polar_server_sessions", "completed"] == 2
    assert page["polar_server_sessions", "queued"] == 0
    assert page["polar_server_results_total", "completed"] == 2
    assert page["polar_server_deliveries_total", "stored"] == 2
    assert page["polar_server_sampled_tokens_total", ""] == sampled
    excluded = sum(value for (name, _), value in page.items() if name == "polar_server_excluded_tokens_total")
    assert page["polar_server_trainable_tokens_total", ""] + excluded == sampled
    assert page["polar_server_reward_sum", ""] == 2.0
    assert page["polar_gateway_sampled_tokens_total", "openai_chat"] == sampled
    assert page["polar_gateway_call_seconds_count", "openai_chat"] == 4
    assert page["polar_gateway_first_token_seconds_count", "openai_chat"] == 4
    assert page["polar_gateway_completions_total", "openai_chat stop"] == 4
    assert page["polar_gateway_open_sessions", ""] == 0
    assert page["polar_node_stage_seconds_count", "running"] == 2
    assert page["polar_node_pool_size", "run"] == 4
    # Places that are kept for work asked for are no sessions: a node at rest has empty pools.
    assert {pool: page["polar_node_pool_occupied", pool] for pool in ("init", "ready", "run")} == {
        "init": 0,
        "ready": 0,
        "run": 0,
    }


async def scraped(whole: System) -> dict[tuple[str, str], float]:
    """Name and labels' values → value, of the samples on the server's page, as this machine reads it."""
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{whole.server.url}{PATH}")
    assert answer.status_code == 200
    return {
        (
            sample.name,
            " ".join(value for key, value in sorted(sample.labels.items()) if key != "le"),
        ): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
