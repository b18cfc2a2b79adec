"""The teacher of on-policy distillation: an engine that says how likely it holds what the policy sampled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from polar.app.own_system import DATA
from polar.app.stack import PROBE, Say, connect_engine
from polar.config.settings import Settings
from polar.engines.base import Engine, EngineDown, ModelInfo
from polar.errors import InvalidInput, retry_async
from polar.models.completion import Ids
from polar.rendering.tokenizer import read_tokenizer
from polar.training.settings import TeacherSettings
from polar.trajectory.packing.batch import Batch, Floats

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Traces that are with the engine together."""
ANSWER_SECONDS = 900.0
"""Longest wait for the scores of one trace, in which an engine may also restart."""


class Teacher:
    """The reference policy of the KL divergence, behind an engine that serves in another thread."""

    def __init__(self, engine: Engine, model: ModelInfo, *, seconds: float = ANSWER_SECONDS) -> None:
        self._engine = engine
        self._model = model
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(AT_ONCE)

    def logprobs(self, batches: Sequence[Batch]) -> list[Floats]:
        """Each term's logprob under the teacher; NaN beyond its context."""
        ended = EngineDown(f"the teacher {self._model.name} has ended", hint="the same command goes on")
        if self._loop.is_closed():
            raise ended
        try:
            found = asyncio.run_coroutine_threadsafe(self._score(batches), self._loop).result()
        except CancelledError:
            raise ended from None
        if missed := sum(int(np.isnan(scores).sum()) for scores in found):
            log.warning("%d tokens are beyond the teacher's context: it says nothing of them", missed)
        return found

    async def _score(self, batches: Sequence[Batch]) -> list[Floats]:
        return await asyncio.gather(*map(self._score_batch, batches))

    async def _score_batch(self, batch: Batch) -> Floats:
        rows = range(len(batch.names))
        scored = await asyncio.gather(*(self._score_row(batch, row) for row in rows))
        return np.concatenate(scored)

    async def _score_row(self, batch: Batch, row: int) -> Floats:
        """The logprobs of a row's terms, which stand together in the batch."""
        targets = batch.terms.targets[batch.terms.rows == row]
        found = np.full(len(targets), np.nan, np.float32)
        depths = batch.positions[targets]
        # The engine needs room for one token after those that it scores.
        is_scored = depths < self._model.max_context - 1
        if is_scored.any():
            ids = _path(batch, int(targets[is_scored][-1])).tolist()
            async with self._room:
                scores = await self._ask(ids)
            found[is_scored] = np.array(scores, np.float32)[depths[is_scored]]
        return found

    async def _ask(self, ids: list[int]) -> list[float]:
        try:
            async with asyncio.timeout(self._seconds):
                return await retry_async(lambda: self._engine.score(ids), purpose="ask the teacher")
        except TimeoutError:
            raise EngineDown(
                f"the teacher {self._model.name} has not scored a trace within {self._seconds:g} s",
                hint="look at its log; the same command goes on",
            ) from None


def _path(batch: Batch, last: int) -> Ids:
    """The tokens that a token of a batch sees, with itself."""
    return batch.ids[: last + 1][batch.ends[: last + 1] > last]


@asynccontextmanager
async def connected_teacher(
    settings: TeacherSettings, out: Path, policy: Path, say: Say
) -> AsyncIterator[Teacher]:
    """Connect to the teacher's engine, or start it, and check that it reads tokens as the model in the
    directory `policy` does."""
    own = Settings(data_dir=out / DATA / "teacher", engine=settings)
    async with connect_engine(own, lambda said: say(f"teacher: {said}")) as engine:
        model = await engine.model_info()
        await _check_tokenizer(engine, model, policy)
        say(f"the teacher is {model.name}")
        yield Teacher(engine, model)


async def _check_tokenizer(engine: Engine, model: ModelInfo, directory: Path) -> None:
    ours = read_tokenizer(directory / "tokenizer.json")
    # Models of one family may differ in their control tokens alone.
    probe = PROBE + "".join(token.content for token in ours.get_added_tokens_decoder().values())
    theirs = await engine.tokenize(probe)
    if theirs is None:
        raise InvalidInput(
            f"the teacher {model.name} does not say how it tokenises",
            hint="serve it with vLLM, SGLang or the embedded engine",
        )
    if theirs != ours.encode(probe, add_special_tokens=False).ids:
        raise InvalidInput(
            f"the teacher {model.name} has another tokenizer than the policy {directory.name}",
            hint="a teacher scores the policy's tokens: choose one of the same model family",
        )
