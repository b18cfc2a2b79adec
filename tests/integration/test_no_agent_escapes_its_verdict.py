"""An agent that keeps its work from being evaluated is scored 0, and does not fail out of its group."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polar.evaluators.base import UNGRADABLE
from polar.models.session import SessionStatus
from tests.sandboxes import require_runtime
from tests.systems import ASK, shell_task, system

ASK_ANYWHERE = ASK.replace(sys.executable, "python3", 1)
FILL = """
for place in . "$HOME" "$TMPDIR"; do head -c 200000000 /dev/zero > "$place/big" 2>/dev/null; done
for place in . "$HOME" "$TMPDIR"; do while mkdir "$place/$i" 2>/dev/null; do i=x$i; done; done
"""


@pytest.mark.parametrize("place", ["live", "fresh"])
@pytest.mark.parametrize(
    "mischief", ["chmod 000 .", FILL, "chmod 000 . $HOME $TMPDIR"], ids=["locked", "full", "all locked"]
)
async def test_a_workspace_that_cannot_be_evaluated_is_worth_nothing(
    tmp_path: Path, mischief: str, place: str
) -> None:
    await require_runtime("bubblewrap")
    task = shell_task(
        "hostile",
        f"{ASK_ANYWHERE}\n{mischief}",
        runtime={"name": "bubblewrap", "options": {"limits": {"disk": "64M"}}},
        evaluator={
            "name": "command",
            "options": {
                "command": "sh check.sh",
                "sandbox": place,
                "files": {"check.sh": {"text": "exit 1"}},
            },
        },
    )
    async with system(tmp_path / "data", ["An answer."]) as running:
        await running.client.submit(task)
        async with running.node():
            (result,) = await running.client.wait(["hostile"], timeout=120)
    assert (result.status, result.reward, result.attempt) == (SessionStatus.COMPLETED, 0.0, 1), result.error
    assert result.verdict is not None
    assert result.verdict.components[UNGRADABLE] == 1.0
