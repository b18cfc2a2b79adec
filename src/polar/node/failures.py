"""Where infrastructure trouble is told from a verdict on the agent, and from a task that cannot be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polar.errors import NotInstalled, PolarError, Unavailable
from polar.models.chat import FinishReason
from polar.models.completion import OUTAGE, SUPERSEDED, Completion
from polar.models.session import AgentEnd, FailureReason
from polar.models.task import TaskSpec
from polar.node.agent import AgentRun
from polar.recordings.capture import CaptureUnwritable
from polar.runtimes.disk import free_bytes

_FULL_BYTES = 1 << 20
"""Less than this is too little for the files that grading itself writes."""
_OUTPUT_SHOWN = 2_000
"""How much of a failing command's output its error repeats; the whole is in the session's logs."""


class Disturbed(Unavailable):
    """The agent was kept from its work, so that what it left says nothing of it."""


class BudgetExceeded(PolarError):
    """A stage took longer than its budget, or its budgets left the agent no model call."""


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """What became of a session's model calls."""

    answered: int = 0
    """Those that the engine answered, at least in part."""
    outage: str | None = None
    """Why the last one was not answered, where that was the engine's fault; open ones, which the session's
    end broke off, are not counted."""

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> ModelCalls:
        own = [it for it in completions if SUPERSEDED not in it.extra]
        finished = [it for it in own if it.finish_reason is not FinishReason.CANCELLED]
        last = finished[-1] if finished else None
        return cls(
            answered=sum(map(_is_answered, own)),
            outage=last.extra.get("error", "") if last is not None and OUTAGE in last.extra else None,
        )


def reason_for(error: Exception) -> FailureReason:
    """What kind of failure an error is. One that nobody foresaw is Polar's own, not the task's."""
    is_foreseen = isinstance(error, PolarError) and not is_outage(error)
    return FailureReason.TASK if is_foreseen else FailureReason.INFRASTRUCTURE


def is_outage(error: BaseException | None) -> bool:
    """Whether an error comes of something that is missing on this node for now, in whose words ever it is
    told."""
    if error is None:
        return False
    # A capture is the node's own file: no task and no agent is to blame where it cannot be written.
    return isinstance(error, Unavailable | NotInstalled | CaptureUnwritable) or is_outage(error.__cause__)


def refuse_full_disk(directory: Path) -> None:
    """Raise where the node's own disk is full: files that could not be written are nobody's work."""
    if free_bytes(directory) < _FULL_BYTES:
        raise Disturbed("this node's disk is full", hint=f"make room below {directory}")


def refuse_disturbed(agent: AgentRun, calls: ModelCalls, task: TaskSpec) -> None:
    """Raise where the agent's work must not be scored, because something else decided how it went.

    An agent must not be able to escape a verdict: what it can bring about by itself is scored.
    """
    if agent.killed_from_outside:
        raise Disturbed(
            "the agent was killed from outside", hint="is memory short on this machine? Did somebody end it?"
        )
    if agent.lost_call:
        raise Disturbed("an answer of the model could not be recorded", hint="is this node's disk full?")
    # An agent that was answered before and ends well did its work: the call that failed was not needed for
    # it, as the one that names a session is not. One that fails after an outage may owe that to it.
    ended_well = bool(calls.answered) and agent.end is AgentEnd.EXITED and agent.exit_code == 0
    if calls.outage is not None and not ended_well:
        raise Disturbed(f"the engine could not answer the agent's last model call: {calls.outage}")
    if calls.answered or task.allow_no_model_calls:
        return
    if agent.end is AgentEnd.BUDGET:
        raise BudgetExceeded(
            f"the session was out of budget before any model call was answered: {agent.spent_budget}"
        )
    raise Disturbed(
        f"the agent ended without a model call ({_ending(agent)})",
        hint="a task that needs none says `allow_no_model_calls: true`",
    )


def _is_answered(completion: Completion) -> bool:
    is_whole = completion.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
    return is_whole or completion.sampled_tokens > 0


def _ending(agent: AgentRun) -> str:
    ended = agent.end if agent.exit_code is None else f"exit code {agent.exit_code}"
    said = agent.stderr.text(_OUTPUT_SHOWN).strip() if agent.stderr is not None else ""
    return f"{ended}: {said}" if said else str(ended)
