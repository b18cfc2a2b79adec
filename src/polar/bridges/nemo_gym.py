"""NeMo Gym: an agent server whose agent is a harness in a Polar session.

`/run` is one rollout: the resources server seeds its session, Polar runs the harness, the resources server
verifies the result, with its cookies passed along. Without a resources server, the task's own evaluator
scores. NeMo RL takes one sequence per session.
"""

from __future__ import annotations

import base64
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from polar.bridges.sessions import TASK, Aligned, ScoredSession, align, as_document, one_session
from polar.client import AsyncClient
from polar.dialects.responses_output import message_item, text_part
from polar.errors import InvalidInput, PolarError, Unavailable, explain
from polar.models.chat import Message, Role
from polar.models.completion import Completion, Routing
from polar.models.task import TaskSpec
from polar.models.trace import Trace
from polar.recordings.recording import Recording
from polar.recordings.tree import path

Body = dict[str, Any]

RESOURCES_SECONDS = 1_800.0

COMPLETED = "completed"
TASK_INDEX = "_ng_task_index"
"""The field that identifies rollouts of the same task."""


class Agent:
    """Runs rows as sessions of a rollout server."""

    def __init__(
        self,
        template: Mapping[str, Any],
        *,
        server: str | None = None,
        token: str | None = None,
        resources: str | None = None,
    ) -> None:
        """Share `template` (harness, runtime, evaluator) among all tasks; `resources` is a URL."""
        self._template = template
        self._client = AsyncClient(server, token)
        self._resources = resources

    async def close(self) -> None:
        await self._client.close()

    async def run(self, body: Body, cookies: Mapping[str, str]) -> Body:
        """Run one rollout: seed, run, verify."""
        async with self._episode(cookies) as resources:
            if resources is not None:
                await _post(resources, "/seed_session", body)
            session = await self._session(body)
            answer = response(session, model_request(body))
            is_masked = not session.traces
            found = {"reward": session.reward or 0.0}
            if resources is not None and session.reward is not None:
                found = await _post(resources, "/verify", body | {"response": answer})
        return {
            **body,
            **found,
            "response": answer,
            "mask_sample": is_masked,
            "polar_session": session.result.session_id,
            "polar_reward": session.reward,
            "polar_excluded": dict(session.excluded),
        }

    async def responses(self, asked: Body) -> Body:
        """Return the agent's answer without resources server or verdict."""
        session = await self._session({"responses_create_params": asked})
        return response(session, asked)

    async def _session(self, body: Body) -> ScoredSession:
        temperature = model_request(body).get("temperature")
        task = task_of(body, self._template)
        session = await one_session(self._client, task, 1.0 if temperature is None else float(temperature))
        return session.with_one_trace()

    @asynccontextmanager
    async def _episode(self, cookies: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientSession | None]:
        """Connect to the resources server with the cookies by which it identifies the rollout."""
        if self._resources is None:
            yield None
            return
        # Gym's servers are reached by IP address, for which cookie jars refuse cookies by default.
        jar = aiohttp.CookieJar(unsafe=True)
        timeout = aiohttp.ClientTimeout(total=RESOURCES_SECONDS)
        async with aiohttp.ClientSession(
            self._resources, cookies=dict(cookies), cookie_jar=jar, timeout=timeout
        ) as session:
            yield session


def app(agent: Agent) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await agent.close()

    made = FastAPI(title="Polar agent for NeMo Gym", lifespan=lifespan)

    @made.post("/run")
    async def run(request: Request, body: Body) -> Body:
        return await agent.run(body, request.cookies)

    @made.post("/v1/responses")
    async def responses(body: Body) -> Body:
        return await agent.responses(body)

    @made.post("/aggregate_metrics")
    async def aggregate_metrics(body: Body) -> Body:
        return aggregate(body.get("verify_responses") or [])

    @made.exception_handler(PolarError)
    async def refuse(_: Request, error: PolarError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422 if isinstance(error, InvalidInput) else 502)

    return made


def task_of(body: Body, template: Mapping[str, Any]) -> TaskSpec:
    """Build the row's task: its own fields override the template's, and its input is the instruction."""
    given = as_document(body.get(TASK) or {})
    if not isinstance(given, dict):
        raise InvalidInput(f"{TASK}: must be a mapping")
    instruction = "\n\n".join(_texts(model_request(body).get("input") or ""))
    try:
        return TaskSpec.model_validate(
            {"id": "nemo-gym", "instruction": instruction, **template, **given, "samples": 1}
        )
    except ValidationError as error:
        raise InvalidInput(f"the row's task: {explain(error)}") from None


def aggregate(verified: Iterable[Mapping[str, Any]]) -> Body:
    """Return statistics of every number in the verdicts, over all rollouts and per task."""
    tasks: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for one in verified:
        tasks[one.get(TASK_INDEX)].append(one)
    everything = _statistics(one for group in tasks.values() for one in group)
    return {
        "agent_metrics": everything,
        "key_metrics": {name: value for name, value in everything.items() if name == "mean/reward"},
        "group_level_metrics": [{TASK_INDEX: index, **_statistics(group)} for index, group in tasks.items()],
    }


def model_request(body: Body) -> Body:
    """Return the row's request to the model, in OpenAI's format."""
    asked: Body = body.get("responses_create_params") or {}
    return asked


def _statistics(verdicts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, value in verdict.items():
            if isinstance(value, int | float) and name != TASK_INDEX:
                numbers[name].append(float(value))
    return {
        f"{kind}/{name}": compute(values)
        for name, values in numbers.items()
        for kind, compute in (
            ("mean", statistics.fmean),
            ("max", max),
            ("min", min),
            ("median", statistics.median),
            ("std", statistics.pstdev),
        )
    }


def _texts(given: Any) -> Iterable[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        yield from _texts(given.get("content") if "content" in given else given.get("text") or "")
    elif isinstance(given, list):
        for part in given:
            yield from _texts(part)


async def _post(resources: aiohttp.ClientSession, path: str, body: Body) -> Body:
    try:
        async with resources.post(path, json=body) as answer:
            if answer.status >= 400:
                raise Unavailable(f"resources server: {path}: {answer.status}: {(await answer.text())[:500]}")
            found: Body = await answer.json()
            return found
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(
            f"resources server: {path}: {error or type(error).__name__}", hint="is it running?"
        ) from error


def response(session: ScoredSession, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the session as one OpenAI response whose items carry the trained tokens of their model calls.

    A trainer reads items with tokens in order, and each prompt must begin with everything before it. So
    prompts are taken from the trace rather than from the calls: where the two differ (because the next
    prompt tokenises a sampled answer differently), the trace is what is trained. Tokens that must not be
    trained become part of the next prompt. If there is nothing to learn, the output is empty.
    """
    output: list[dict[str, Any]] = []
    created_at = 0.0
    if session.recording is not None:
        for trace in session.traces:
            places = list(_places(session.recording, trace))
            output += _items(places, align(trace))
            created_at = places[0][0].started_at
    return {
        "id": f"resp_{session.result.session_id}",
        "object": "response",
        "created_at": created_at,
        "status": COMPLETED,
        "model": session.result.model or "",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
    }


def _places(recording: Recording, trace: Trace) -> Iterator[tuple[Completion, slice]]:
    by_id = {one.id: one for one in recording.completions}
    segments = recording.trajectory.segments
    last = trace.completion_ids[-1]
    (trained,) = (
        ref.trained for ref in recording.trajectory.traces if segments[ref.trained[-1]].completion_id == last
    )
    start = 0
    for index in path(segments, trained[-1]):
        end = start + len(segments[index].ids)
        if index in trained:
            yield by_id[segments[index].completion_id or ""], slice(start, end)
        start = end


def _items(places: list[tuple[Completion, slice]], whole: Aligned) -> Iterator[dict[str, Any]]:
    before: Completion | None = None
    for number, (call, place) in enumerate(places):
        if before is not None:
            # New input since the previous call and its answer.
            yield from _input_items(call.messages[len(before.messages) + 1 :], number)
        *others, last = _output_items(call)
        yield from others
        *cut_off, end = _generations(whole, place) or [{}]
        for part, generation in enumerate(cut_off):
            yield message_item(f"{call.id}_{part}", [text_part("")], COMPLETED) | generation
        yield last | end
        before = call


def _generations(whole: Aligned, place: slice) -> list[dict[str, Any]]:
    """Return the trained runs of a call: one, unless a token inside it must not be trained."""
    edges = np.flatnonzero(np.diff(whole.mask[place], prepend=0, append=0)) + place.start
    return [
        {
            "prompt_token_ids": whole.ids[:start].tolist(),
            "generation_token_ids": whole.ids[start:end].tolist(),
            "generation_log_probs": whole.logprobs[start:end].tolist(),
            **({} if whole.routing is None else {"routed_experts": _envelope(whole.routing[:end])}),
        }
        for start, end in edges.reshape(-1, 2).tolist()
    ]


def _envelope(routing: Routing) -> str:
    """Encode the experts of tokens for NeMo RL; -1 marks unknown ones, for which its router decides."""
    known = routing.any((1, 2), keepdims=True)
    told = np.where(known, routing.astype(np.int16), np.int16(-1))
    shape = "x".join(map(str, told.shape))
    return f"nrlre1:int16:{shape}:{base64.b64encode(told.astype('<i2').tobytes()).decode()}"


def _output_items(call: Completion) -> list[dict[str, Any]]:
    """Return the model's output: at least one item, so that its tokens have a place."""
    message, items = call.response, []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"id": f"rs_{call.id}", "type": "reasoning", "summary": summary})
    if message.content or not message.tool_calls:
        items.append(message_item(call.id, [text_part(message.content)], COMPLETED))
    items += [
        {
            "id": f"fc_{call.id}_{number}",
            "type": "function_call",
            "status": COMPLETED,
            "call_id": tool.id,
            "name": tool.name,
            "arguments": tool.arguments,
        }
        for number, tool in enumerate(message.tool_calls)
    ]
    return items


def _input_items(messages: tuple[Message, ...], turn: int) -> Iterator[dict[str, Any]]:
    for number, message in enumerate(messages):
        match message.role:
            case Role.TOOL:
                yield {
                    "id": f"fco_{turn}_{number}",
                    "type": "function_call_output",
                    "status": COMPLETED,
                    "call_id": message.tool_call_id or "",
                    "output": message.content,
                }
            case Role.ASSISTANT:
                yield message_item(f"{turn}_{number}", [text_part(message.content)], COMPLETED)
            case Role.USER | Role.SYSTEM:
                yield {"type": "message", "role": str(message.role), "content": message.content}
