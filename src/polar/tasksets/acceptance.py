"""What conditions on ended sessions can speak of: `reward >= 1 and completions < 20`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from polar.models.session import SessionResult
from polar.tasksets.expressions import Condition, parse_condition

NAMES = (
    "reward",
    "components",
    "agent_end",
    "exit_code",
    "completions",
    "traces",
    "sampled_tokens",
    "trainable_tokens",
    "seconds",
    "sample",
    "task",
    "metadata",
)


def parse_acceptance(text: str, option: str = "--accept") -> Condition:
    """The condition in `text`; InvalidInput names the column of what is wrong and the names there are."""
    return parse_condition(text, option, known=NAMES)


def session_names(result: SessionResult, task: str, metadata: Mapping[str, JsonValue]) -> dict[str, Any]:
    """The values of NAMES for one session."""
    stats = result.stats
    values = (
        result.reward,
        result.verdict.components if result.verdict else {},
        result.agent_end.value,
        result.exit_code,
        stats.completions,
        stats.traces,
        stats.sampled_tokens,
        stats.trainable_tokens,
        result.seconds.running,
        result.sample,
        task,
        metadata,
    )
    return dict(zip(NAMES, values, strict=True))
