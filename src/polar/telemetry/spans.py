"""OpenTelemetry spans of sessions and completions; imported only where traces are exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from polar import __version__
from polar.models.chat import FinishReason, Message, Role
from polar.models.completion import Completion
from polar.models.session import Lease, SessionResult, SessionStatus
from polar.telemetry.tracing import SessionSpan

_W3C = TraceContextTextMapPropagator()
_PROVIDER = "polar"

Attributes = dict[str, Any]


class Spans:
    def __init__(self, processor: SpanProcessor, about: Mapping[str, str], *, with_content: bool) -> None:
        self._provider = TracerProvider(resource=Resource.create(dict(about)), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("polar", __version__)
        self._with_content = with_content

    def session(self, lease: Lease, *, node: str, model: str) -> SessionSpans:
        harness = lease.task.harness.name
        attributes: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.agent.name": harness,
            "gen_ai.conversation.id": lease.session_id,
            "gen_ai.request.model": model,
            "polar.session.id": lease.session_id,
            "polar.task.id": lease.task.id,
            "polar.sample": lease.sample,
            "polar.attempt": lease.attempt,
            "polar.node": node,
        }
        span = self._tracer.start_span(f"invoke_agent {harness}", Context(), attributes=attributes)
        return SessionSpans(self._tracer, span, lease.task.evaluator.name, with_content=self._with_content)

    def completion(self, done: Completion, *, session_id: str, model: str, parent: str | None) -> None:
        context = _W3C.extract({"traceparent": parent}, Context()) if parent else Context()
        attributes = _completion_attributes(done, session_id, model)
        if self._with_content:
            attributes |= _content(done)
        span = self._tracer.start_span(
            f"chat {model}",
            context,
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=_nanoseconds(done.started_at),
        )
        if done.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            span.set_attribute("error.type", done.finish_reason.value)
            span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(max(done.ended_at, done.started_at)))

    def close(self) -> None:
        self._provider.shutdown()


class SessionSpans(SessionSpan):
    def __init__(self, tracer: Tracer, span: Span, evaluator: str, *, with_content: bool) -> None:
        self._tracer = tracer
        self._span = span
        self._evaluator = evaluator
        self._with_content = with_content
        self._stage = self._begin(SessionStatus.INIT)

    @property
    def traceparent(self) -> str | None:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(self._stage, Context()))
        return carrier.get("traceparent")

    def enter(self, stage: SessionStatus) -> None:
        self._stage.end()
        self._stage = self._begin(stage)

    def end(self, result: SessionResult | None) -> None:
        if not self._span.is_recording():
            return
        self._stage.end()
        if result is None:
            self._span.set_attribute("polar.status", "given_up")
        else:
            self._span.set_attributes(_result_attributes(result, self._evaluator))
        if result is None or result.status is SessionStatus.FAILED:
            error = (result.error or "").encode("ascii", "backslashreplace").decode() if result else ""
            self._span.set_attribute("error.type", "failed" if result else "given_up")
            self._span.set_status(Status(StatusCode.ERROR, error if self._with_content else None))
        self._span.end()

    def _begin(self, stage: SessionStatus) -> Span:
        return self._tracer.start_span(
            stage.value, set_span_in_context(self._span, Context()), attributes={"polar.stage": stage.value}
        )


def _result_attributes(result: SessionResult, evaluator: str) -> Attributes:
    stats = result.stats
    found: Attributes = {
        "polar.status": result.status.value,
        "polar.agent_end": result.agent_end.value,
        "polar.completions": stats.completions,
        "polar.tokens.sampled": stats.sampled_tokens,
        "polar.tokens.trainable": stats.trainable_tokens,
        "gen_ai.agent.version": result.harness_version,
        "polar.policy_version.min": result.policy_version_min,
        "polar.policy_version.max": result.policy_version_max,
    }
    if result.reward is not None:
        found |= {"gen_ai.evaluation.name": evaluator, "gen_ai.evaluation.score.value": result.reward}
    return _present(found)


def _completion_attributes(done: Completion, session_id: str, model: str) -> Attributes:
    used, versions = done.used, done.policy_versions
    return _present(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": done.id,
            "gen_ai.response.finish_reasons": [done.finish_reason.value],
            "gen_ai.response.time_to_first_chunk": (
                done.first_token_at - done.started_at if done.first_token_at else None
            ),
            "gen_ai.conversation.id": session_id,
            "gen_ai.usage.input_tokens": done.prompt_tokens,
            "gen_ai.usage.output_tokens": done.sampled_tokens,
            "gen_ai.usage.cache_read.input_tokens": done.cached_tokens or None,
            "gen_ai.request.temperature": used.temperature,
            "gen_ai.request.top_p": used.top_p,
            "gen_ai.request.top_k": used.top_k,
            "gen_ai.request.max_tokens": used.max_tokens,
            "gen_ai.request.seed": used.seed,
            "polar.session.id": session_id,
            "polar.dialect": done.dialect,
            "polar.policy_version.min": int(versions.min()) if len(versions) else None,
            "polar.policy_version.max": int(versions.max()) if len(versions) else None,
        }
    )


def _present(attributes: Attributes) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


def _content(done: Completion) -> Attributes:
    answer = {**_message(done.response), "finish_reason": done.finish_reason.value}
    return {
        # In ASCII: what a program printed need not be valid text, and spans take nothing else.
        "gen_ai.input.messages": json.dumps([_message(said) for said in done.messages]),
        "gen_ai.output.messages": json.dumps([answer]),
    }


def _message(message: Message) -> dict[str, Any]:
    if message.role is Role.TOOL:
        part = {"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}
        return {"role": message.role.value, "parts": [part]}
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.content:
        parts.append({"type": "text", "content": message.content})
    parts += [
        {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
    ]
    return {"role": message.role.value, "parts": parts}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
