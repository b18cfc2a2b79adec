"""Settles a tool choice, however a provider words it, against the tools that are offered."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from polar.dialects.json_fields import malformed
from polar.models.chat import ToolChoice, ToolDefinition, ToolUse


def settled(
    use: ToolUse,
    names: Sequence[str],
    tools: Sequence[ToolDefinition],
    at: str,
    *,
    parallel: bool = True,
    elsewhere: Collection[str] = (),
) -> ToolChoice:
    """The choice; `at` is where the body makes it.

    `elsewhere` names declared tools that a provider runs itself. Nobody does here, so a choice of them
    alone leaves the model to answer as it can, which is what their clients cope with best.
    """
    offered = {tool.name for tool in tools}
    for name in names:
        if name not in offered and name not in elsewhere:
            raise malformed(at, f"there is no tool {name!r} among those offered")
    left = tuple(dict.fromkeys(name for name in names if name in offered))
    if use is ToolUse.REQUIRED and not (left if names else offered):
        if not elsewhere:
            raise malformed(at, "there are no tools to choose from")
        return ToolChoice(parallel=parallel)
    return ToolChoice(use, () if set(left) == offered else left, parallel)
