"""Sandboxes: which runtimes work here, and how well they keep sessions within bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator

from polar import plugins
from polar.app.diagnosis.finding import Area, Finding
from polar.config.settings import NodeSettings
from polar.runtimes.base import Runtime

AREA = Area("sandboxes")

_WEAKER = ("watched", "not ", "copied")
"""How the words begin that say a bound is kept less strictly, or more slowly, than the kernel would."""
_MEND = (
    "give Polar a control group of its own that it may write (systemd: Delegate=yes; docker: --privileged or"
    " --cgroupns=private with a writable /sys/fs/cgroup) and the right to mount; see docs/sandboxes.md"
)


async def findings(settings: NodeSettings) -> AsyncIterator[Finding]:
    for name in plugins.names("runtimes"):
        runtime: type[Runtime] = plugins.load("runtimes", name)
        is_used = name in settings.runtimes
        reason = await runtime.unavailable()
        if reason is not None:
            yield _unavailable(name, reason, is_used=is_used)
            continue
        yield AREA.ok(name, "works" if is_used else f"works; tasks may name it if {name} is in node.runtimes")
        if is_used and (kept := dict(await runtime.enforcement())):
            yield _bounds(name, kept)


def _unavailable(name: str, reason: str, *, is_used: bool) -> Finding:
    if not is_used:
        fix = f"nothing, unless tasks need it: then mend that, and add {name} to node.runtimes"
        return AREA.warning(name, f"not available: {reason}", fix)
    return AREA.problem(name, reason, f"mend that, or take {name} out of node.runtimes")


def _bounds(name: str, kept: dict[str, str]) -> Finding:
    detail = "; ".join(f"{what}: {how}" for what, how in kept.items())
    if any(how.startswith(_WEAKER) for how in kept.values()):
        return AREA.warning(f"{name} limits", detail, _MEND)
    return AREA.ok(f"{name} limits", detail)
