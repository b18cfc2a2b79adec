"""An asynchronous client, or a stand-in for one, behind the methods of the synchronous one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self


class Blocking:
    def __init__(self, client: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(self._client.__aexit__(*error))
        self._runner.close()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            answer = method(*arguments, **options)
            return self._runner.run(answer) if inspect.iscoroutine(answer) else self._iterate(answer)

        return call

    def _iterate(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        async def step() -> Any:
            return await anext(items, None)

        while (item := self._runner.run(step())) is not None:
            yield item
