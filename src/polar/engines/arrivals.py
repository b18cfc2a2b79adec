"""Tokens that have arrived at once go on at once: whoever falls behind the engine catches up in one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, groupby

from polar.engines.base import TokenChunk


def coalesce_chunks(read: Iterable[TokenChunk | None]) -> Iterator[TokenChunk]:
    """As few chunks as the versions of their tokens allow; an error comes after what was read before it."""
    arrived: list[TokenChunk] = []
    failure: Exception | None = None
    try:
        for chunk in read:
            if chunk is None:
                continue
            arrived.append(chunk)
    except Exception as error:
        failure = error
    for version, alike in groupby(arrived, lambda chunk: chunk.policy_version):
        yield _joined(list(alike), version)
    if failure is not None:
        raise failure


def _joined(chunks: list[TokenChunk], version: int) -> TokenChunk:
    if len(chunks) == 1:
        return chunks[0]
    return TokenChunk(
        ids=list(chain.from_iterable(chunk.ids for chunk in chunks)),
        logprobs=list(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        policy_version=version,
        cached_tokens=max(chunk.cached_tokens for chunk in chunks),
    )
