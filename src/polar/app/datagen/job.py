"""One generation from its plan to its dataset."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from polar.app.datagen.place import Place
from polar.app.datagen.plan import PlannedTask
from polar.app.datagen.progress import Tally, shown
from polar.app.datagen.run import Generation
from polar.client import AsyncClient, Client
from polar.tasksets.expressions import Condition
from polar.tasksets.sft import CARD, Written, card, write_dataset


@dataclass(frozen=True, slots=True)
class Job:
    """What a generation was asked for."""

    plan: Sequence[PlannedTask]
    accept: Condition
    out: Path
    retries: int
    at_once: int
    """Tasks in flight."""
    made_with: Mapping[str, Any]
    """What the dataset's card tells of how it was made."""

    async def carry_out(self, place: Place, console: Console) -> Written:
        """Run the plan at this place and write the dataset; cancelled, write what there is first."""
        tally = Tally(sum(planned.spec.samples for planned in self.plan))
        generation = Generation(self.plan, self.accept, self.retries, tally)
        try:
            async with AsyncClient(place.url, place.token) as client:
                with shown(tally, console) as generation.changed:
                    await generation.run(client, self.at_once)
        except asyncio.CancelledError:
            await self._write(generation, place)
            console.print("the dataset holds what has ended; the same command goes on from here")
            raise
        return await self._write(generation, place)

    async def _write(self, generation: Generation, place: Place) -> Written:
        def write() -> Written:
            # In a thread: the server that is read from may run on this very loop.
            with Client(place.url, place.token) as client:
                return write_dataset(generation.groups(client), self.out, self.accept)

        written = await asyncio.to_thread(write)
        text = card(self.out.resolve().name, written, self.made_with)
        (self.out / CARD).write_text(text, encoding="utf-8")
        return written
