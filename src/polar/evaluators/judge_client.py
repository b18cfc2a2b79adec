"""Asks a judge over an OpenAI-compatible endpoint, remembers its answers, and tries again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from polar.errors import PolarError
from polar.evaluators.base import JudgeEndpoint

log = logging.getLogger(__name__)

T = TypeVar("T")
PAUSES = (0.5, 2.0, 5.0)
"""Seconds before each new attempt; the last one repeats."""
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class JudgeFailed(PolarError):
    """The judge gave no usable answer."""


class JudgeClient:
    """One endpoint with a memory of what it answered; the same question is not asked twice."""

    def __init__(self, endpoint: JudgeEndpoint, cache: Path | None) -> None:
        self._endpoint = endpoint
        self._cache = cache

    async def ask(
        self, body: Mapping[str, Any], identity: Sequence[object], read: Callable[[str], T], *, attempts: int
    ) -> T:
        """The answer to a request, as `read` understands it; JudgeFailed after so many attempts.

        `read` raises ValueError for nonsense. `identity` is what makes two questions the same one.
        """
        file = self._file(identity)
        if file is not None and (known := _load(file)) is not None:
            with suppress(ValueError):
                return read(known)
        problem = "it was not asked"
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(PAUSES[min(attempt, len(PAUSES)) - 1])
            try:
                text = await self._post(body)
                answer = read(text)
            except _Again as error:
                problem = str(error)
            except ValueError as error:
                problem = f"its answer makes no sense: {error}"
            else:
                _save(file, text)
                return answer
            log.info("judge %s: attempt %d failed: %s", self._endpoint.model, attempt + 1, problem)
        raise JudgeFailed(f"the judge {self._endpoint.model} failed {attempts} times, at last: {problem}")

    async def _post(self, body: Mapping[str, Any]) -> str:
        import httpx

        key = self._endpoint.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self._endpoint.url.rstrip('/')}/chat/completions"
        try:
            # The caller's budget ends the call; a judge may think for long.
            async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0)) as client:
                answer = await client.post(url, json={"model": self._endpoint.model, **body}, headers=headers)
        except httpx.HTTPError as error:
            raise _Again(f"it cannot be reached: {type(error).__name__}") from None
        if answer.status_code != 200:
            told = f"HTTP {answer.status_code}: {self._without_key(answer.text[:500])}"
            if answer.status_code in _AGAIN:
                raise _Again(told)
            raise JudgeFailed(f"the judge {self._endpoint.model} refused: {told}")
        try:
            content = answer.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            raise _Again("its response has not the form of a chat completion") from None
        if not isinstance(content, str):
            raise _Again("its response holds no text")
        return content

    def _without_key(self, text: str) -> str:
        return text.replace(self._endpoint.api_key, "[key]") if self._endpoint.api_key else text

    def _file(self, identity: Sequence[object]) -> Path | None:
        if self._cache is None:
            return None
        told = json.dumps([self._endpoint.url, self._endpoint.model, *identity], sort_keys=True, default=str)
        return self._cache / "judge" / f"{hashlib.sha256(told.encode()).hexdigest()}.json"


class _Again(Exception):
    """A failure that may pass."""


def _load(file: Path) -> str | None:
    try:
        answer = json.loads(file.read_text())["answer"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return answer if isinstance(answer, str) else None


def _save(file: Path | None, answer: str) -> None:
    """Whole or not at all, since other sessions read it at the same time."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "w") as stream:
        json.dump({"answer": answer}, stream)
    os.replace(temporary, file)
