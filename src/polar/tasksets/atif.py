"""Sessions as trajectories in ATIF, the format in which Harbor and tools around it exchange them.

A trajectory is a line of steps, and a session is a tree. Model calls that go on with each other are one
trajectory. Where a context was continued twice, was rewritten or began anew, another one begins, and what it
holds of earlier answers is marked as copied: every model call is a step that is no copy exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from polar.errors import PolarError
from polar.files import make_directory, write_atomic
from polar.models.chat import Message, Role, ToolCall
from polar.models.completion import REPLAYED, Completion
from polar.models.trace import Lineage
from polar.recordings.recording import Recording
from polar.recordings.tree import TokenTree
from polar.tasksets.conversations import tool_schema
from polar.tasksets.export import ExportedSession
from polar.trajectory.lineage import trace_ancestry

SCHEMA = "ATIF-v1.8"
Step = dict[str, Any]
Asking = dict[str, tuple[str, Step]]
"""Id of a tool call, as the harness knows it → its id in its step, and the step."""


@dataclass(slots=True)
class WrittenTrajectories:
    sessions: int = 0
    trajectories: int = 0
    without_calls: int = 0
    """Sessions left out because no model call of theirs is recorded: a trajectory has at least one step."""


def write_trajectories(sessions: Iterable[ExportedSession], directory: Path) -> WrittenTrajectories:
    """Write SESSION.json for each session."""
    make_directory(directory)
    written = WrittenTrajectories()
    for session in sessions:
        if session.recording is None or not session.recording.completions:
            written.without_calls += 1
            continue
        document = _document(session, session.recording)
        try:
            text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY).decode()
            write_atomic(directory / f"{session.result.session_id}.json", text)
        except OSError as error:
            raise PolarError(f"{directory}: cannot be written: {error.strerror or error}") from error
        written.sessions += 1
        written.trajectories += 1 + len(document.get("subagent_trajectories", ()))
    return written


@dataclass(slots=True)
class _Line:
    """Model calls of which each goes on with the one before, message for message."""

    calls: list[Completion]
    lineage: Lineage
    origin: int | None
    """The line it came out of."""


def _document(session: ExportedSession, recording: Recording) -> dict[str, Any]:
    """The line of the main conversation in which most was sampled, with all other lines in it."""
    lines, result = _lines(recording.tree), session.result
    trajectory = recording.trajectory
    places = {place for ref in trajectory.traces for place in ref.trained}
    trained = {trajectory.segments[place].completion_id for place in places}
    documents: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        tools = [tool_schema(tool) for tool in line.calls[-1].tools]
        agent = {"name": session.harness, "version": result.harness_version or "unknown"}
        origin = None if line.origin is None else f"{result.session_id}-{line.origin}"
        document: dict[str, Any] = {
            "schema_version": SCHEMA,
            "session_id": result.session_id,
            "trajectory_id": f"{result.session_id}-{number}",
            "agent": agent | _known(model_name=result.model, tool_definitions=tools or None),
            "steps": _steps(line.calls, recording.tree, trained),
            "final_metrics": {
                "total_prompt_tokens": sum(call.prompt_tokens for call in line.calls),
                "total_completion_tokens": sum(call.sampled_tokens for call in line.calls),
                "total_cached_tokens": sum(call.cached_tokens for call in line.calls),
            },
            "extra": _known(lineage=line.lineage.value, parent_trajectory_id=origin),
        }
        documents.append(document)
    mains = [number for number, line in enumerate(lines) if line.lineage is Lineage.MAIN]
    sampled = [document["final_metrics"]["total_completion_tokens"] for document in documents]
    root = documents.pop(max(mains or range(len(lines)), key=sampled.__getitem__))
    root["extra"] |= {"result": result.model_dump(mode="json"), "metadata": dict(session.metadata)}
    return root | _known(subagent_trajectories=documents or None)


def _lines(tree: TokenTree) -> list[_Line]:
    ancestry = trace_ancestry(tree)
    places = {completion.id: place for place, completion in enumerate(tree.completions)}
    # Where an engine gives no tokens, what a call goes on with is known from its messages.
    before = [
        places.get(completion.follows or "") if link.continues is None else link.continues
        for completion, link in zip(tree.completions, tree.links, strict=True)
    ]
    heirs = _heirs(tree.completions, before)
    lines: list[_Line] = []
    of: list[int] = []
    for place, (completion, earlier) in enumerate(zip(tree.completions, before, strict=True)):
        if earlier is not None and heirs.get(earlier) == place:
            of.append(of[earlier])
            lines[of[place]].calls.append(completion)
            continue
        if earlier is None:
            parent = ancestry.conversations[ancestry.of[place]].parent
            members = () if parent is None else ancestry.conversations[parent].members
            earlier = max((member for member in members if member < place), default=tree.links[place].twin)
        of.append(len(lines))
        lines.append(_Line([completion], ancestry.lineage(place), None if earlier is None else of[earlier]))
    return lines


def _heirs(completions: Sequence[Completion], before: Sequence[int | None]) -> dict[int, int]:
    """Call → the one that goes on with it on its line: where most is sampled, the earliest of equals."""
    heirs: dict[int, int] = {}
    sampled = [completion.sampled_tokens for completion in completions]
    for place in reversed(range(len(completions))):
        if place in heirs:
            sampled[place] += sampled[heirs[place]]
        earlier = before[place]
        if earlier is not None and _goes_on(completions[earlier], completions[place]):
            heir = heirs.get(earlier)
            heirs[earlier] = place if heir is None or sampled[place] >= sampled[heir] else heir
    return heirs


def _goes_on(earlier: Completion, later: Completion) -> bool:
    """Whether a request has all messages of an earlier one, and then an answer."""
    count = len(earlier.messages)
    is_answered = len(later.messages) > count and later.messages[count].role is Role.ASSISTANT
    pairs = zip(earlier.messages, later.messages, strict=False)
    return is_answered and all(_identity(one) == _identity(other) for one, other in pairs)


def _identity(message: Message) -> tuple[Role, str, list[str]]:
    """What makes messages the same: not ids, nor thoughts, which harnesses drop."""
    return message.role, message.content, [call.name for call in message.tool_calls]


def _steps(calls: Sequence[Completion], tree: TokenTree, trained: set[str | None]) -> list[Step]:
    steps: list[Step] = []
    asking: Asking = {}
    known = 0
    for call in calls:
        new = call.messages[known:]
        echo = list(takewhile(lambda message: message.role is Role.ASSISTANT, new)) if known else []
        again = [asked.id for message in echo for asked in message.tool_calls]
        for id, answered in zip(again, steps[-1].get("tool_calls", ()) if again else (), strict=False):
            asking[id] = answered["tool_call_id"], steps[-1]
        for message in new[len(echo) :]:
            _give(message, steps, asking)
        steps.append(_said(call.response, asking, **_call(call, tree, trained)))
        known = len(call.messages)
    return [{"step_id": place, **step} for place, step in enumerate(steps, 1)]


def _call(call: Completion, tree: TokenTree, trained: set[str | None]) -> dict[str, Any]:
    has_logprobs = len(call.sampled_ids) == len(call.logprobs) > 0 and np.isfinite(call.logprobs).all()
    metrics = _known(
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.sampled_tokens,
        cached_tokens=call.cached_tokens,
        prompt_token_ids=np.ascontiguousarray(call.prompt_ids) if len(call.prompt_ids) else None,
        completion_token_ids=np.ascontiguousarray(call.sampled_ids) if len(call.sampled_ids) else None,
        logprobs=np.ascontiguousarray(call.logprobs) if has_logprobs else None,
        extra={"policy_versions": np.ascontiguousarray(call.policy_versions)} if has_logprobs else None,
    )
    about = _known(
        completion_id=call.id,
        finish_reason=call.finish_reason.value,
        continuation=tree.links[call.index].kind,
        trained=call.id in trained,
        untrainable=call.untrainable,
        replayed_from=call.extra.get(REPLAYED),
    )
    at = datetime.fromtimestamp(call.ended_at, UTC).isoformat()
    step = {"timestamp": at, "metrics": metrics, "llm_call_count": 1, "extra": about}
    return step | ({"is_copied_context": True} if REPLAYED in call.extra else {})


def _give(message: Message, steps: list[Step], asking: Asking) -> None:
    """Add a message of a request; an answer in it is a copy, and a result belongs to the step of its call."""
    if message.role is Role.ASSISTANT:
        steps.append(_said(message, asking, is_copied_context=True))
    elif message.role is not Role.TOOL:
        steps.append({"source": message.role.value, "message": message.content})
    else:
        if not steps:
            steps.append({"source": "system", "message": ""})
        id, step = asking.get(message.tool_call_id or "", (None, steps[-1]))
        # ATIF lets a result name no call but those of its own step.
        unknown = {"tool_call_id": message.tool_call_id} if id is None and message.tool_call_id else None
        result = _known(source_call_id=id, content=message.content, extra=unknown)
        step.setdefault("observation", {"results": []})["results"].append(result)


def _said(message: Message, asking: Asking, **more: Any) -> Step:
    calls = [_tool_call(call) for call in message.tool_calls]
    step: Step = {"source": "agent", "message": message.content}
    step |= _known(reasoning_content=message.reasoning, tool_calls=calls or None, **more)
    asking |= {call.id: (call.id, step) for call in message.tool_calls}
    return step


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """A call; arguments that are no JSON object stand beside it as text."""
    try:
        arguments = orjson.loads(call.arguments or "{}")
    except ValueError:
        arguments = None
    known = {"tool_call_id": call.id, "function_name": call.name}
    if isinstance(arguments, dict):
        return {**known, "arguments": arguments}
    return {**known, "arguments": {}, "extra": {"arguments": call.arguments}}


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
