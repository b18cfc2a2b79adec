"""NeMo Gym: an agent server whose agent is a harness in a Polar session.

`/run` is one rollout: the resources server seeds its session, Polar runs the harness, the resources server
verifies what came of it; its cookies travel along. Without a resources server the task's own evaluator is the
judge. NeMo RL takes one sequence a session.
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

from polar.bridges.sessions import TASK, Aligned, ScoredSession, aligned, as_document, one_session
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
"""How long a resources server may take to seed or to verify."""

COMPLETED = "completed"
TASK_INDEX = "_ng_task_index"
"""In the bodies of rollouts: which of them are of one task."""


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
        """`template` is what all tasks have in common: harness, runtime, evaluator. `resources` is a URL."""
        self._template = template
        self._client = AsyncClient(server, token)
        self._resources = resources

    async def close(self) -> None:
        await self._client.close()

    async def run(self, body: Body, cookies: Mapping[str, str]) -> Body:
        """One rollout: seed, run, verify."""
        async with self._episode(cookies) as resources:
            if resources is not None:
                await _post(resources, "/seed_session", body)
            session = await self._session(body)
            answer = response(session, asked_of(body))
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
        """The agent's answer alone: no resources server, no verdict."""
        session = await self._session({"responses_create_params": asked})
        return response(session, asked)

    async def _session(self, body: Body) -> ScoredSession:
        temperature = asked_of(body).get("temperature")
        task = task_of(body, self._template)
        session = await one_session(self._client, task, 1.0 if temperature is None else float(temperature))
        return session.narrowed()

    @asynccontextmanager
    async def _episode(self, cookies: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientSession | None]:
        """A connection to the resources server with cookies of its own: by them it tells rollouts apart."""
        if self._resources is None:
            yield None
            return
        # Gym's servers are reached by address, for which a cookie jar is strict unless told otherwise.
        jar = aiohttp.CookieJar(unsafe=True)
        timeout = aiohttp.ClientTimeout(total=RESOURCES_SECONDS)
        async with aiohttp.ClientSession(
            self._resources, cookies=dict(cookies), cookie_jar=jar, timeout=timeout
        ) as session:
            yield session


def app(agent: Agent) -> FastAPI:
    """The agent's HTTP interface."""

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
        return aggregated(body.get("verify_responses") or [])

    @made.exception_handler(PolarError)
    async def refuse(_: Request, error: PolarError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422 if isinstance(error, InvalidInput) else 502)

    return made


def task_of(body: Body, template: Mapping[str, Any]) -> TaskSpec:
    """The row's task: what it says itself, over the template, over its input as the instruction."""
    given = as_document(body.get(TASK) or {})
    if not isinstance(given, dict):
        raise InvalidInput(f"{TASK}: must be a mapping")
    instruction = "\n\n".join(_texts(asked_of(body).get("input") or ""))
    try:
        return TaskSpec.model_validate(
            {"id": "nemo-gym", "instruction": instruction, **template, **given, "samples": 1}
        )
    except ValidationError as error:
        raise InvalidInput(f"the row's task: {explain(error)}") from None


def aggregated(verified: Iterable[Mapping[str, Any]]) -> Body:
    """Statistics of every number in the verdicts, over all rollouts and over those of each task."""
    tasks: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for one in verified:
        tasks[one.get(TASK_INDEX)].append(one)
    everything = _statistics(one for group in tasks.values() for one in group)
    return {
        "agent_metrics": everything,
        "key_metrics": {name: value for name, value in everything.items() if name == "mean/reward"},
        "group_level_metrics": [{TASK_INDEX: index, **_statistics(group)} for index, group in tasks.items()],
    }


def asked_of(body: Body) -> Body:
    """What the row asks the model for, in OpenAI's words."""
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
    """The text of a response's input: one string, or messages of strings or of parts."""
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
    """The session as one OpenAI response, with the tokens that are trained on the items of their model calls.

    A trainer reads the items that carry tokens in order, and each prompt must begin with all that came before
    it. So prompts are what stands before in the trace, not what the call was sent: where the two differ
    (sampled answers that the next prompt holds in other tokens), the trace is what is trained. Tokens that
    must not be trained are part of the next prompt. Where nothing can be learnt, the output is empty.
    """
    output: list[dict[str, Any]] = []
    created_at = 0.0
    if session.recording is not None:
        for trace in session.traces:
            places = list(_places(session.recording, trace))
            output += _items(places, aligned(trace))
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
    """The model calls that the trace was built of, each with the place of what it sampled."""
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
            # After what was asked before and what was answered to it.
            yield from _given(call.messages[len(before.messages) + 1 :], number)
        *others, last = _said(call)
        yield from others
        *cut_off, end = _generations(whole, place) or [{}]
        for part, generation in enumerate(cut_off):
            yield message_item(f"{call.id}_{part}", [text_part("")], COMPLETED) | generation
        yield last | end
        before = call


def _generations(whole: Aligned, place: slice) -> list[dict[str, Any]]:
    """The trained runs of what a call sampled: one, unless a token in the midst of it must not be trained."""
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
    """The experts of tokens as NeMo RL reads them; -1 where they are not known, and its router decides."""
    known = routing.any((1, 2), keepdims=True)
    told = np.where(known, routing.astype(np.int16), np.int16(-1))
    shape = "x".join(map(str, told.shape))
    return f"nrlre1:int16:{shape}:{base64.b64encode(told.astype('<i2').tobytes()).decode()}"


def _said(call: Completion) -> list[dict[str, Any]]:
    """What the model gave: at least one item, so that its tokens have a place."""
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


def _given(messages: tuple[Message, ...], turn: int) -> Iterator[dict[str, Any]]:
    """What the harness answered before it called again."""
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
