"""Scores a session by a rubric that a model applies to its transcript and to files it left.

The judge is asked by the node, not through the gateway: none of its tokens is ever part of a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from enum import StrEnum

from pydantic import BaseModel, Field

from polar.evaluators.base import EvaluationContext, EvaluationFailed, Evaluator
from polar.evaluators.judge_client import JudgeClient, JudgeFailed
from polar.evaluators.judge_prompt import (
    Criterion,
    Opinion,
    answer_schema,
    judge_messages,
    middle_cut,
    read_opinion,
    transcript,
)
from polar.evaluators.output import cut
from polar.models.completion import Completion
from polar.models.session import Verdict
from polar.models.task import WorkspacePath
from polar.runtimes.base import SandboxError

SAME_MARK = "0" * 16
"""Stands for the mark in a question's identity: it is another one every time."""


class OnFailure(StrEnum):
    """What becomes of a session whose judge gives no usable answer."""

    CLOSED = "closed"
    """Its evaluation fails; it gets no reward."""
    OPEN = "open"
    """It gets `open_reward`, and the report says so."""


class JudgeEvaluator(Evaluator):
    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        endpoint: str = Field(min_length=1)
        """Name of an endpoint in the node's settings (`node.judges`), which has the address and the key."""
        rubric: dict[str, Criterion] = Field(min_length=1, max_length=64)
        """Criterion → what it means. The reward is the weighted mean of the scores."""
        transcript: bool = True
        """Whether the judge is shown what the agent said and did."""
        files: tuple[WorkspacePath, ...] = Field(default=(), max_length=32)
        """Files of the workspace that the judge is shown."""
        per_trace: bool = False
        """Judge every trace by itself: each gets its own reward, the session their mean."""
        max_characters: int = Field(default=100_000, ge=1_000, le=4_000_000)
        """How much of the transcript, and of each file, is shown."""
        max_tokens: int = Field(default=2_048, ge=16)
        """Of the judge's answer."""
        temperature: float = Field(default=0.0, ge=0, le=2)
        """What the judge samples with."""
        structured: bool = True
        """Ask the endpoint to keep the answer to its JSON schema; not all endpoints can."""
        attempts: int = Field(default=3, ge=1, le=20)
        """How often it is asked until it gives an answer that can be read."""
        on_failure: OnFailure = OnFailure.CLOSED
        open_reward: float = Field(default=0.0, allow_inf_nan=False)
        """The reward where no such answer came and `on_failure` is `open`."""

    options: Options

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        endpoint = context.judges.get(self.options.endpoint)
        if endpoint is None:
            raise EvaluationFailed(
                f"evaluator.options.endpoint: this node has no judge {self.options.endpoint!r}",
                hint=f"node.judges has {', '.join(sorted(context.judges)) or 'none'}",
            )
        client = JudgeClient(endpoint, context.cache)
        shown = [("task", context.task.instruction), *await self._files(context)]
        try:
            if self.options.per_trace:
                return await self._judge_traces(client, context, shown)
            return await self._judge_session(client, context, shown)
        except JudgeFailed as error:
            if self.options.on_failure is OnFailure.CLOSED:
                raise EvaluationFailed(str(error)) from error
            return Verdict(
                reward=self.options.open_reward, components={"judge_failed": 1.0}, report=cut(str(error))
            )

    async def _judge_session(
        self, client: JudgeClient, context: EvaluationContext, shown: list[tuple[str, str]]
    ) -> Verdict:
        completions = await asyncio.to_thread(context.completions) if self.options.transcript else []
        ends = _ends(completions)
        share = max(1_000, self.options.max_characters // max(1, len(ends)))
        parts = [(f"transcript {number}", transcript(end, share)) for number, end in enumerate(ends, start=1)]
        opinion = await self._ask(client, [*shown, *parts])
        return Verdict(reward=self._reward(opinion), components=dict(opinion.scores), report=_report(opinion))

    async def _judge_traces(
        self, client: JudgeClient, context: EvaluationContext, shown: list[tuple[str, str]]
    ) -> Verdict:
        by_id = {completion.id: completion for completion in await asyncio.to_thread(context.completions)}
        rewards: dict[str, float] = {}
        reports = []
        for name in context.trace_ends:
            text = transcript(by_id[name], self.options.max_characters)
            opinion = await self._ask(client, [*shown, ("transcript", text)])
            rewards[name] = self._reward(opinion)
            reports.append(f"{name}: {rewards[name]:g}\n{_report(opinion)}")
        if not rewards:
            raise JudgeFailed("there is no trace to judge")
        mean = sum(rewards.values()) / len(rewards)
        return Verdict(
            reward=mean,
            components={"traces_judged": float(len(rewards))},
            report=cut("\n\n".join(reports)),
            trace_rewards=rewards,
        )

    async def _ask(self, client: JudgeClient, parts: list[tuple[str, str]]) -> Opinion:
        options = self.options
        body: dict[str, object] = {
            "messages": judge_messages(options.rubric, parts),
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        if options.structured:
            schema = {"name": "opinion", "schema": answer_schema(options.rubric), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        identity = (
            judge_messages(options.rubric, parts, mark=SAME_MARK),
            options.temperature,
            options.max_tokens,
        )
        return await client.ask(
            body, identity, lambda text: read_opinion(text, options.rubric), attempts=options.attempts
        )

    async def _files(self, context: EvaluationContext) -> list[tuple[str, str]]:
        """A file that is not there is shown as missing: that may be just what is to be judged."""
        parts = []
        for path in self.options.files:
            try:
                data = await context.sandbox.download(context.sandbox.workspace / path)
                text = middle_cut(data.decode(errors="replace"), self.options.max_characters)
            except SandboxError:
                text = "[there is no such file]"
            parts.append((f"file {path}", text))
        return parts

    def _reward(self, opinion: Opinion) -> float:
        weights: Mapping[str, float] = {name: item.weight for name, item in self.options.rubric.items()}
        total = sum(weights.values())
        return sum(opinion.scores[name] * weight for name, weight in weights.items()) / total


def _ends(completions: Iterable[Completion]) -> list[Completion]:
    """The last completion of every conversation: those that no other continues."""
    known = list(completions)
    continued = {name for completion in known for name in (completion.parent, completion.follows) if name}
    return [completion for completion in known if completion.id not in continued]


def _report(opinion: Opinion) -> str:
    scores = ", ".join(f"{name} {score:g}" for name, score in opinion.scores.items())
    return f"{scores}\n{opinion.rationale}"
