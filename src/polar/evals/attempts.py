"""What an evaluation keeps of a session: its reward, its cost, and why it failed if it did."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import Field

from polar.models.completion import Completion
from polar.models.component import Frozen
from polar.models.session import AgentEnd, SessionResult, SessionStatus

LONGEST_ERROR = 2_000
LONGEST_REASON = 100


class Attempt(Frozen):
    """One sample of one task, ended."""

    session_id: str
    task_id: str
    """As the server knows it; the report groups by the taskset's own ids."""
    sample: int
    status: SessionStatus
    agent_end: AgentEnd
    exit_code: int | None = None
    reward: float | None = None
    error: str | None = None
    completions: int = 0
    prompt_tokens: int = 0
    """Of all completions, the history counted with each."""
    cached_tokens: int = 0
    """Of these: what the engine says it did not compute anew."""
    sampled_tokens: int = 0
    excluded: dict[str, int] = Field(default_factory=dict)
    """Sampled tokens that are not trainable, by reason."""
    seconds: float = 0.0
    """From the sandbox's making to the verdict, without waiting for a place."""
    agent_seconds: float = 0.0
    harness_version: str | None = None
    model: str | None = None

    @property
    def counts(self) -> bool:
        """Whether it is an attempt at all: what a user cancelled says nothing of the agent."""
        return self.status is not SessionStatus.CANCELLED

    def passed(self, threshold: float) -> bool:
        """A session that failed has not passed, whatever the cause."""
        done = self.status is SessionStatus.COMPLETED and self.reward is not None
        return done and self.reward is not None and self.reward >= threshold - 1e-9

    def reason(self, threshold: float) -> str | None:
        """Why it did not pass, in words that many sessions share; None if it did."""
        if self.passed(threshold):
            return None
        if self.status is SessionStatus.CANCELLED:
            return "cancelled"
        if self.status is SessionStatus.FAILED:
            return f"failed: {error_class(self.error or 'no reason given')}"
        match self.agent_end:
            case AgentEnd.TIMEOUT:
                return "agent ran out of time"
            case AgentEnd.BUDGET:
                return "agent ran out of its budget of completions or tokens"
            case AgentEnd.EXITED if not self.completions:
                return "agent made no model call"
            case AgentEnd.EXITED if self.exit_code:
                return f"agent exited with {self.exit_code}"
            case AgentEnd.EXITED:
                return "agent finished, reward too low"
            case _:
                return f"agent {self.agent_end.replace('_', ' ')}"


def attempt_of(result: SessionResult, completions: Iterable[Completion]) -> Attempt:
    """What is kept of a session, from its result and its recorded model calls."""
    seconds = result.seconds
    calls = tuple(completions)
    return Attempt(
        session_id=result.session_id,
        task_id=result.task_id,
        sample=result.sample,
        status=result.status,
        agent_end=result.agent_end,
        exit_code=result.exit_code,
        reward=result.reward,
        error=result.error and result.error[:LONGEST_ERROR],
        completions=result.stats.completions,
        prompt_tokens=sum(call.prompt_tokens for call in calls),
        cached_tokens=sum(call.cached_tokens for call in calls),
        sampled_tokens=result.stats.sampled_tokens,
        excluded=result.stats.excluded,
        seconds=seconds.init + seconds.running + seconds.postrun,
        agent_seconds=seconds.running,
        harness_version=result.harness_version,
        model=result.model,
    )


_PARTICULARS = (
    (re.compile(r"https?://\S+"), "URL"),
    (re.compile(r"(?<![\w.])~?/[\w.+@-]+(?:/[\w.+@-]+)*/?"), "PATH"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b", re.IGNORECASE), "ID"),
    (re.compile(r"\d+(?:\.\d+)?"), "N"),
)


def error_class(error: str) -> str:
    """An error's first line without what is particular to one session: equal faults count together."""
    lines = error.strip().splitlines()
    text = " ".join(lines[0].split()) if lines else ""
    for pattern, word in _PARTICULARS:
        text = pattern.sub(word, text)
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"
