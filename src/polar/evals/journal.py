"""The attempts of an evaluation as they end, a line each: what is in it is not run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from polar.errors import InvalidInput
from polar.evals.attempts import Attempt
from polar.files import lock

JOURNAL_FILE = "attempts.jsonl"


class Journal:
    """Append-only, held by one process. A line that a kill cut short is dropped at the next opening."""

    def __init__(self, out: Path) -> None:
        self._path = out / JOURNAL_FILE
        self._attempts: dict[str, dict[int, Attempt]] = {}
        """By task and sample."""
        self._file = self._path.open("a+b")
        lock(self._file, busy=InvalidInput(f"{out}: another evaluation is at work there"))
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                attempt = Attempt.model_validate_json(line)
            except ValidationError:
                raise InvalidInput(
                    f"{self._path}:{number}: not an attempt of this version of Polar",
                    hint="give another --out",
                ) from None
            self._add(attempt)

    def __contains__(self, key: tuple[str, int]) -> bool:
        task_id, sample = key
        return sample in self._attempts.get(task_id, ())

    def __iter__(self) -> Iterator[Attempt]:
        for samples in self._attempts.values():
            yield from samples.values()

    def append(self, attempt: Attempt) -> None:
        self._file.write(attempt.model_dump_json().encode() + b"\n")
        self._file.flush()
        self._add(attempt)

    def of(self, task_id: str) -> tuple[Attempt, ...]:
        """The attempts at a task, by sample."""
        return tuple(attempt for _, attempt in sorted(self._attempts.get(task_id, {}).items()))

    def _add(self, attempt: Attempt) -> None:
        self._attempts.setdefault(attempt.task_id, {})[attempt.sample] = attempt
