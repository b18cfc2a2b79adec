"""slime: a custom generate function whose samples are the traces of a Polar session.

    --custom-generate-function-path polar.bridges.slime.generate
    --custom-reward-post-process-path polar.bridges.slime.normalise

A prompt's metadata carries its task. slime takes any number of samples a session: `tokens` is prompt and
response together, mask and logprobs are those of the response only. Samples of one session share a
`rollout_id`, by which slime counts it once in the loss, and `normalise` counts it once in its group.
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
"""In a sample's metadata: what its session was given; None where it failed and is no part of its group."""
SHARE = "polar_share"
"""In a sample's metadata: what part of that is its own."""
FILLER = 0
"""A token of every vocabulary, for a session that there is nothing to learn from."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """One session of the sample's task."""
    session = await one_session(
        client_of_this_loop(), task_of(sample.metadata), float(sampling_params.get("temperature", 1.0))
    )
    replays = getattr(args, "use_rollout_routing_replay", False)
    return samples(session, sample, (args.num_layers, args.moe_router_topk) if replays else None)


def samples(session: ScoredSession, asked: Any, routed: tuple[int, int] | None = None) -> list[Any]:
    """A sample for each trace; at least one, that is not trained where there is nothing to learn from.

    With the experts of their tokens where slime replays them, which takes the number of layers and of experts
    in each.
    """
    session = session if routed is None else session.routed()
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
    # slime makes tensors of every sample's arrays, also of one that it does not train.
    nothing.tokens, nothing.response_length = [FILLER, FILLER], 1
    nothing.loss_mask, nothing.rollout_log_probs = [0], [0.0]
    nothing.rollout_routed_experts = None if routed is None else routes(None, *routed)
    nothing.reward = session.reward or 0.0
    nothing.status = status.FAILED if session.reward is None else status.COMPLETED
    nothing.remove_sample = True
    return [nothing]


def normalise(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Raw rewards, and the advantages of sessions in their groups: each counts once, whatever its traces.

    A trace has its share of its session's advantage, also where it has a reward of its own. A group without
    two different rewards has nothing to compare: its advantages are 0.
    """
    flat = [one for given in samples for one in (given if isinstance(given, list) else [given])]
    raw = [float(one.get_reward_value(args)) for one in flat]
    groups: dict[Any, dict[Any, float]] = defaultdict(dict)
    for one in flat:
        if one.metadata[REWARD] is not None:
            groups[one.group_index][one.rollout_id] = one.metadata[REWARD]
    baseline_of = {
        # The same for all of the group.
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
    """The policy's versions that sampled the trace, oldest first."""
    return [str(version) for version in np.unique(trace.policy_versions[trace.loss_mask == 1])]
