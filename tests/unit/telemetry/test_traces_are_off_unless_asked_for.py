"""Spans cost nothing until there is a place for them, and then tell how sessions and calls ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from polar.config.settings import TelemetrySettings, load_settings
from polar.errors import InvalidInput, NotInstalled
from polar.models.chat import FinishReason, Message, Role, Sampling, ToolCall
from polar.models.completion import CACHED, Completion
from polar.models.session import Lease, LeaseKey, SessionResult, SessionStatus
from polar.models.task import TaskSpec
from polar.telemetry import tracing
from polar.telemetry.tracing import exporting

LEASE = Lease(
    session_id="t.0",
    task=TaskSpec.model_validate(
        {"id": "t", "instruction": "Do it.", "harness": "pi", "evaluator": "session_completed"}
    ),
    sample=0,
    attempt=2,
    key=LeaseKey(fencing_token=1, secret=""),
    expires_at=0.0,
)


def completion(finish_reason: FinishReason = FinishReason.TOOL_CALLS) -> Completion:
    ids = np.arange(4, dtype=np.int32)
    now = time.time()
    return Completion(
        id="c1",
        index=0,
        prompt_ids=np.arange(9, dtype=np.int32),
        sampled_ids=ids,
        logprobs=np.zeros(4, np.float32),
        policy_versions=np.array([3, 3, 4, 4], np.int32),
        messages=(
            Message(Role.USER, "the question"),
            Message(Role.TOOL, "the output", tool_call_id="call_1"),
        ),
        response=Message(Role.ASSISTANT, "the answer", "the thought", (ToolCall("call_2", "bash", "{}"),)),
        finish_reason=finish_reason,
        dialect="anthropic_messages",
        used=Sampling(temperature=0.5, max_tokens=100),
        started_at=now - 2,
        first_token_at=now - 1.5,
        ended_at=now,
        extra={CACHED: "5"},
    )


def result(status: SessionStatus, error: str | None = None) -> SessionResult:
    return SessionResult(session_id="t.0", task_id="t", sample=0, attempt=2, status=status, error=error)


async def spans_of(act: Any, **settings: Any) -> dict[str, Any]:
    memory = InMemorySpanExporter()
    with patch.object(trace_exporter, "OTLPSpanExporter", return_value=memory):
        async with exporting(TelemetrySettings(traces="http://collector:4318", **settings), {}):
            act()
    return {span.name: span for span in memory.get_finished_spans()}


def test_without_a_place_there_are_no_spans_and_no_sdk() -> None:
    program = (
        "import sys, polar.app.stack; from polar.telemetry import tracing;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')], 'it is loaded'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    span = tracing.session(LEASE, node="n", model="m")
    span.enter(SessionStatus.RUNNING)
    span.end(None)
    assert span.traceparent is None
    tracing.completion(completion(), session_id="t.0", model="m", parent=None)


async def test_a_completion_follows_the_conventions() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    done = completion()
    spans = await spans_of(lambda: tracing.completion(done, session_id="t.0", model="m", parent=parent))
    span = spans["chat m"]
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "polar",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "c1",
        "gen_ai.response.finish_reasons": ("tool_calls",),
        "gen_ai.response.time_to_first_chunk": pytest.approx(0.5, abs=1e-3),
        "gen_ai.conversation.id": "t.0",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 100,
        "polar.session.id": "t.0",
        "polar.dialect": "anthropic_messages",
        "polar.policy_version.min": 3,
        "polar.policy_version.max": 4,
    }
    assert span.end_time - span.start_time == pytest.approx(2e9, rel=0.01)
    assert span.status.status_code is StatusCode.UNSET


async def test_content_is_carried_only_where_it_is_asked_for() -> None:
    def act() -> None:
        tracing.completion(completion(), session_id="t.0", model="m", parent=None)

    told = (await spans_of(act, trace_content=True))["chat m"].attributes
    assert "the question" in told["gen_ai.input.messages"]
    assert '"tool_call_response"' in told["gen_ai.input.messages"]
    for said in ("the answer", "the thought", "bash"):
        assert said in told["gen_ai.output.messages"]
    odd = replace(completion(), response=Message(Role.ASSISTANT, "half \ud83d a letter"))
    spans = await spans_of(
        lambda: tracing.completion(odd, session_id="t.0", model="m", parent=None), trace_content=True
    )
    assert spans["chat m"].attributes["gen_ai.output.messages"].isascii()
    untold = (await spans_of(act))["chat m"]
    assert "the " not in untold.to_json()


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.CANCELLED])
async def test_a_call_that_broke_off_is_an_error(reason: FinishReason) -> None:
    done = completion(reason)
    span = (await spans_of(lambda: tracing.completion(done, session_id="s", model="m", parent=None)))[
        "chat m"
    ]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == reason.value


async def test_stages_follow_each_other_below_their_session() -> None:
    def act() -> None:
        span = tracing.session(LEASE, node="n", model="m")
        for stage in (SessionStatus.READY, SessionStatus.RUNNING):
            span.enter(stage)
        assert span.traceparent is not None
        span.end(result(SessionStatus.COMPLETED))
        span.end(None)

    spans = await spans_of(act)
    root = spans["invoke_agent pi"]
    assert root.parent is None
    assert root.attributes["polar.status"] == "completed"
    assert root.attributes["polar.attempt"] == 2
    assert root.status.status_code is StatusCode.UNSET
    stages = [spans[name] for name in ("init", "ready", "running")]
    assert {stage.parent.span_id for stage in stages} == {root.context.span_id}
    assert all(one.end_time <= two.start_time for one, two in pairwise(stages))


async def test_a_session_that_failed_or_was_given_up_is_an_error_whose_text_stays_here() -> None:
    def fail() -> None:
        tracing.session(LEASE, node="n", model="m").end(result(SessionStatus.FAILED, "it said: the answer"))

    def give_up() -> None:
        tracing.session(LEASE, node="n", model="m").end(None)

    failed = (await spans_of(fail))["invoke_agent pi"]
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "failed")
    assert "the answer" not in failed.to_json()
    assert "the answer" in (await spans_of(fail, trace_content=True))["invoke_agent pi"].to_json()
    assert (await spans_of(give_up))["invoke_agent pi"].attributes["polar.status"] == "given_up"


async def test_where_spans_go_is_said_by_file_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLAR_CONFIG", raising=False)
    monkeypatch.setenv("POLAR_OTEL", "http://collector:4318")
    assert load_settings().telemetry.traces == "http://collector:4318"
    monkeypatch.setenv("POLAR_OTEL", "collector")
    with pytest.raises(InvalidInput, match=r"telemetry\.traces"):
        load_settings()
    monkeypatch.delenv("POLAR_OTEL")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    async with exporting(TelemetrySettings(traces="off"), {}):
        assert tracing.session(LEASE, node="n", model="m").traceparent is None
    async with exporting(TelemetrySettings(), {}):
        assert tracing.session(LEASE, node="n", model="m").traceparent is not None
    assert tracing.session(LEASE, node="n", model="m").traceparent is None


async def test_without_the_extra_a_wish_is_an_error_and_a_stray_variable_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (
        "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotInstalled, match=r"polar-rl\[otel\]"):
        async with exporting(TelemetrySettings(traces="http://collector:4318"), {}):
            raise AssertionError
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    async with exporting(TelemetrySettings(), {}):
        assert tracing.session(LEASE, node="n", model="m").traceparent is None
    assert "polar-rl[otel] is not installed" in caplog.text


async def test_a_collector_that_is_down_holds_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "LAST_SPANS_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with exporting(TelemetrySettings(traces=url), {}):
            tracing.session(LEASE, node="n", model="m").end(result(SessionStatus.COMPLETED))
    assert "could not be sent within 0.2 s" in caplog.text
