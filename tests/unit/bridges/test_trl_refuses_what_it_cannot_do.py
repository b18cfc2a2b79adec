"""What the TRL bridge cannot do it refuses before a session is begun."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from polar.bridges.trl import Rollouts
from polar.errors import InvalidInput
from tests.systems import shell_task

ROLLOUTS = Rollouts([shell_task("known", "true")], server="http://127.0.0.1:9", token="token")


def test_a_prompt_that_is_no_task_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"no task has the id 'Say something.'.*dataset"):
        ROLLOUTS(["known", "Say something."], SimpleNamespace())


@pytest.mark.parametrize("sharding", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_a_model_sharded_over_processes_is_refused(sharding: str) -> None:
    switches = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False, sharding: True}
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=0), **switches)
    with pytest.raises(InvalidInput, match=r"sharded over processes.*DDP"):
        ROLLOUTS(["known"], trainer)
