"""slime: a custom generate function whose samples are the traces of a Polar session.

    --custom-generate-function-path polar.bridges.slime.generate
    --custom-reward-post-process-path polar.bridges.slime.normalise

A prompt's metadata carries its task. slime takes any number of samples per session: `tokens` is prompt and
response together, mask and logprobs cover only the response. Samples of one session share a `rollout_id`, so
slime counts the session once in the loss, and `normalise` counts it once in its group.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from polar.bridges.sessions import (
    ScoredSession,
    client_of_this_loop,
    one_session,
    routes,
    task_of,
    trainer_module,
)
from polar.models.trace import Trace
from polar.trajectory.learnable import Advantage, baselines

_slime = trainer_module(
    "slime.utils.types", hint="install slime as its documentation says; it is not on PyPI"
)

REWARD = "polar_reward"
"""Metadata key of the session's reward; None if it failed and is not part of its group."""
SHARE = "polar_share"
"""Metadata key of the sample's share of that reward."""
FILLER = 0
"""A token of every vocabulary, for sessions with nothing to learn."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """Run one session of the sample's task."""
    session = await one_session(
        client_of_this_loop(), task_of(sample.metadata), float(sampling_params.get("temperature", 1.0))
    )
    replays = getattr(args, "use_rollout_routing_replay", False)
    return samples(session, sample, (args.num_layers, args.moe_router_topk) if replays else None)


def samples(session: ScoredSession, asked: Any, routed: tuple[int, int] | None = None) -> list[Any]:
    """Return one sample per trace, or a single untrained one if there is nothing to learn.

    `routed` is the number of layers and of experts per layer, if slime replays routing.
    """
    session = session if routed is None else session.with_routing()
    status = _slime.Sample.Status
    metadata = {
        **(asked.metadata or {}),
        "polar_session": session.result.session_id,
        "polar_excluded": dict(session.excluded),
        REWARD: session.reward,
    }
    rollout_id = asked.index if asked.rollout_id is None else asked.rollout_id
    made = []
    for trace in session.traces:
        one = _sample(asked, metadata, rollout_id)
        one.tokens = np.concatenate([trace.prompt_ids, trace.response_ids]).tolist()
        one.response_length = len(trace.response_ids)
        one.loss_mask = trace.loss_mask.tolist()
        one.rollout_log_probs = trace.logprobs.tolist()
        one.reward = trace.reward
        one.metadata[SHARE] = trace.share
        one.weight_versions = _versions(trace)
        one.rollout_routed_experts = None if routed is None else routes(trace, *routed)
        one.status = status.COMPLETED
        made.append(one)
    if made:
        return made
    nothing = _sample(asked, metadata, rollout_id)
    # slime makes tensors of every sample's arrays, even of untrained samples.
    nothing.tokens, nothing.response_length = [FILLER, FILLER], 1
    nothing.loss_mask, nothing.rollout_log_probs = [0], [0.0]
    nothing.rollout_routed_experts = None if routed is None else routes(None, *routed)
    nothing.reward = session.reward or 0.0
    nothing.status = status.FAILED if session.reward is None else status.COMPLETED
    nothing.remove_sample = True
    return [nothing]


def normalise(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return raw rewards and group advantages; each session counts once, however many traces it has.

    Each trace gets its share of its session's advantage, even if it has a reward of its own. If all rewards
    of a group are equal, its advantages are 0.
    """
    flat = [one for given in samples for one in (given if isinstance(given, list) else [given])]
    raw = [float(one.get_reward_value(args)) for one in flat]
    groups: dict[Any, dict[Any, float]] = defaultdict(dict)
    for one in flat:
        if one.metadata[REWARD] is not None:
            groups[one.group_index][one.rollout_id] = one.metadata[REWARD]
    baseline_of = {
        # All samples of the group have the same.
        group: baselines([[reward] for reward in sessions.values()], Advantage.GROUP)[0]
        for group, sessions in groups.items()
    }
    normalised = [0.0] * len(flat)
    for number, one in enumerate(flat):
        share, against = one.metadata.get(SHARE), baseline_of.get(one.group_index)
        if share is not None and against is not None:
            normalised[number] = against.advantage(one.metadata[REWARD], share)
    return raw, normalised


def _sample(asked: Any, metadata: dict[str, Any], rollout_id: Any) -> Any:
    one = copy.copy(asked)
    one.metadata = dict(metadata)
    one.rollout_id = rollout_id
    return one


def _versions(trace: Trace) -> list[str]:
    return [str(version) for version in np.unique(trace.policy_versions[trace.loss_mask == 1])]
