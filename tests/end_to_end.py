"""One end-to-end test for every shape of the system: what is submitted, and what must have come of it."""

from __future__ import annotations

from collections.abc import Collection

from polar.client import AsyncClient
from polar.models.session import SessionStatus
from polar.models.task import TaskStatus
from polar.recordings import recording
from polar.trajectory.materialise import materialise
from tests.systems import ASK, shell_task

TASKS = 4
SAMPLES = 6
IDS = tuple(f"t{number}" for number in range(TASKS))


async def submit_everything(client: AsyncClient, before: str = "") -> None:
    """Small tasks; `before` is what each agent does before it asks the model."""
    for id in IDS:
        await client.submit(shell_task(id, before + ASK, samples=SAMPLES))


async def assert_everything_came(client: AsyncClient, answer: str, nodes: Collection[str]) -> None:
    """Each session has ended once, on one of these nodes, all of which had work; its tokens are whole."""
    results = await client.wait(IDS, timeout=120)
    assert sorted(result.session_id for result in results) == sorted(
        f"{id}.{sample}" for id in IDS for sample in range(SAMPLES)
    )
    for result in results:
        assert (result.status, result.reward) == (SessionStatus.COMPLETED, 1.0), result
        kept = recording.decode(await client.recording(result.session_id))
        (ref,) = kept.trajectory.traces
        trace = materialise(kept.trajectory, ref)
        assert "".join(map(chr, trace.response_ids[:-1])) == answer
        assert trace.loss_mask.all()
        assert trace.reward == 1.0
    assert {view.status for view in [await client.task(id) for id in IDS]} == {TaskStatus.FINISHED}
    assert {view.node async for view in client.sessions()} == set(nodes)
