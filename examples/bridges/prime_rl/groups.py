"""Rolls out one group per task and prints what prime-rl's trainer would receive.

python examples/bridges/prime_rl/groups.py examples/bridges/tasks.yaml --samples 8
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from polar.bridges.prime_rl import training_samples
from polar.bridges.sessions import Order, roll_out_groups
from polar.client import AsyncClient
from polar.tasksets.files import load_tasks


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    async with AsyncClient() as client:
        orders = [Order(task, given.samples) for task in load_tasks(given.tasks)]
        groups = await roll_out_groups(client, orders)
    for order, group in zip(orders, groups, strict=True):
        samples = training_samples(group, env_name=order.task.id)
        tokens = sum(sum(sample.mask) for sample in samples)
        rewards = [session.reward for session in group]
        print(f"{order.task.id}: rewards {rewards}, {len(samples)} samples, {tokens} trained tokens")


if __name__ == "__main__":
    asyncio.run(main())
