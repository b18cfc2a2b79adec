"""verl: an agent loop whose agent is a harness in a Polar session.

Configure it in verl as an agent loop with `_target_: polar.bridges.verl.PolarAgentLoop`; each row of the
dataset carries its task in `extra_info`. verl takes one sequence per session, with separate prompt and
response; mask and logprobs cover only the response.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from polar.bridges.sessions import (
    ScoredSession,
    client_of_this_loop,
    filling,
    one_session,
    response_lists,
    routes,
    task_of,
    trainer_module,
)

_verl = trainer_module(
    "verl.experimental.agent_loop.agent_loop", hint="install verl 0.9 as its documentation says"
)


class PolarAgentLoop(_verl.AgentLoopBase):  # type: ignore[misc,name-defined]
    """Runs one session for each prompt that verl requests."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        session = await one_session(
            client_of_this_loop(),
            task_of(kwargs.get("extra_info") or {}),
            float(sampling_params.get("temperature", 1.0)),
        )
        limits = self.rollout_config
        fitting = session.truncated(limits.prompt_length, limits.response_length)
        replays = getattr(limits, "enable_rollout_routing_replay", False)
        shape = layers_and_experts(self.config.actor_rollout_ref.model.path) if replays else None
        return output(fitting, self.tokenizer.eos_token_id, shape)


@cache
def layers_and_experts(model: str) -> tuple[int, int]:
    """Return a model's number of layers, and of experts per token."""
    transformers = trainer_module("transformers", hint="verl depends on it")
    config = transformers.AutoConfig.from_pretrained(model).get_text_config()
    return config.num_hidden_layers, config.num_experts_per_tok


def output(session: ScoredSession, filler: int, routed: tuple[int, int] | None = None) -> Any:
    """Return the session's trace that trains the most tokens.

    `routed` is the number of layers and of experts per layer, if verl replays routing. verl needs a row for
    every session: one with nothing to learn becomes a row of two untrained tokens, with reward 0 if it
    failed.
    """
    session = (session if routed is None else session.with_routing()).with_one_trace()
    trace = next(iter(session.traces), None)
    row = response_lists(*session.traces) if session.traces else filling(filler)
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
    versions = [v for trace in session.traces for v in trace.policy_versions[trace.loss_mask == 1].tolist()]
    return _verl.AgentLoopOutput(
        **dict(zip(names, row, strict=True)),
        routed_experts=None if routed is None else routes(trace, *routed),
        reward_score=session.reward or 0.0,
        num_turns=2 * session.result.stats.completions,
        metrics=_verl.AgentLoopMetrics(generate_sequences=session.result.seconds.running),
        extra_fields={
            "polar_session": session.result.session_id,
            "polar_status": str(session.result.status),
            "polar_excluded": dict(session.excluded),
            "polar_version_min": min(versions, default=-1),
            "polar_version_max": max(versions, default=-1),
        },
    )
