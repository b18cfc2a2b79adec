"""Sources of a run: endless material for steps, resumable exactly."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from polar.errors import InvalidInput
from polar.models.trace import Trace
from polar.recordings.recording import DamagedRecording, decode, is_recording, read_head
from polar.training.material import (
    Credited,
    Material,
    PolicyVersions,
    is_over_budget,
    material,
    pack,
    weighted_rows,
    within_budget,
)
from polar.training.settings import GrpoSettings, SftSettings
from polar.trajectory.learnable import EndedSession, Excluded, Group

log = logging.getLogger(__name__)

TOKENS_FILE = "tokens.parquet"


class MaterialSource(Protocol):
    """Source of each step's material."""

    def take(self, versions: PolicyVersions) -> Material:
        """Return the next step's material for the current policy, waiting for it."""

    def state(self) -> dict[str, Any]:
        """State for `restore` to continue identically; plain values only."""

    def restore(self, state: dict[str, Any]) -> None: ...


class Shuffled:
    """Numbers below `count`, shuffled anew each round; resumable anywhere."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self.position = 0

    @property
    def round(self) -> int:
        """Number of completed rounds."""
        return self.position // self._count

    def next(self) -> int:
        order = np.random.default_rng([self._seed, self.round]).permutation(self._count)
        found = int(order[self.position % self._count])
        self.position += 1
        return found


class _ShuffledSource:
    """A fixed supply, in a random order."""

    _order: Shuffled

    def state(self) -> dict[str, Any]:
        return {"position": self._order.position}

    def restore(self, state: dict[str, Any]) -> None:
        self._order.position = state["position"]


class Recordings(_ShuffledSource):
    """Groups from recordings on disk: learning without an engine, repeatable exactly."""

    def __init__(self, settings: GrpoSettings, directory: Path) -> None:
        self._settings = settings
        self._groups, self._newest = _index(directory)
        self._order = Shuffled(len(self._groups), settings.seed)

    def take(self, versions: PolicyVersions) -> Material:
        settings = self._settings
        groups = [self._next() for _ in range(settings.groups)]
        # How stale a token is, is counted from the newest policy recorded.
        newest = PolicyVersions(self._newest)
        return material(
            groups, settings.objective, settings.batch, newest, settings.seed, settings.minibatches
        )

    def _next(self) -> Group:
        turn = self._order.round, self._order.next()
        task_id, files = self._groups[turn[1]]
        return Group(task_id, tuple(map(_read_session, files)), turn)


class Dataset(_ShuffledSource):
    """Rows of `polar generate`'s token tables."""

    def __init__(self, settings: SftSettings) -> None:
        self._settings = settings
        self._traces = [trace for path in settings.data for trace in _read_traces(path)]
        if not self._traces:
            raise InvalidInput("the datasets hold no rows", hint="generate with another --accept condition")
        self._order = Shuffled(len(self._traces), settings.seed)

    def take(self, versions: PolicyVersions) -> Material:
        settings = self._settings
        chosen = [self._order.next() for _ in range(settings.rows)]
        credited = []
        excluded: Counter[str] = Counter()
        for place, number in enumerate(chosen):
            trace = self._traces[number]
            # A row that comes twice in a step keeps two names.
            name = f"{place}-{number}"
            if is_over_budget(trace, settings.batch):
                excluded[Excluded.TRACES_OVER_BUDGET] += 1
            elif (kept := within_budget(trace, settings.batch, excluded)).loss_mask.any():
                credited.append(Credited(name, name, kept))
        packing = pack(weighted_rows(credited, settings.level), settings.batch)
        return Material((packing,), {"rows": float(len(chosen))}, excluded)


def _index(directory: Path) -> tuple[list[tuple[str, list[Path]]], int]:
    """Files of each task's recordings by sample, and their newest policy version."""
    if not directory.is_dir():
        raise InvalidInput(f"{directory}: no such directory")
    found: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    newest = 0
    for path in sorted(directory.rglob("*")):
        if not path.is_file() or not is_recording(path):
            continue
        try:
            result = read_head(path)
        except DamagedRecording as error:
            log.warning("%s is left out: %s", path, error)
            continue
        found[result.task_id].append((result.sample, path))
        newest = max(newest, result.policy_version_max or 0)
    if not found:
        raise InvalidInput(f"{directory}: contains no recordings")
    groups = [(task, [path for _, path in sorted(found[task])]) for task in sorted(found)]
    return groups, newest


def _read_session(path: Path) -> EndedSession:
    try:
        recording = decode(path.read_bytes())
        return EndedSession(recording.result, recording)
    except DamagedRecording as error:
        log.warning("%s: %s", path, error)
        return EndedSession(read_head(path), None)


def _read_traces(path: Path) -> list[Trace]:
    import pyarrow.parquet as pq

    file = path / TOKENS_FILE if path.is_dir() else path
    columns = ["input_ids", "loss_mask", "logprobs", "policy_versions", "prompt_length"]
    try:
        table = pq.read_table(file, columns=columns).to_pydict()
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{file}: cannot be read as tokens: {str(error).splitlines()[0]}",
            hint="name a directory that `polar generate` wrote, or the tokens.parquet in it",
        ) from None
    return [_trace(*values) for values in zip(*(table[name] for name in columns), strict=True)]


def _trace(ids: list[int], mask: list[int], logprobs: list[float], versions: list[int], prompt: int) -> Trace:
    return Trace(
        prompt_ids=np.array(ids[:prompt], np.int32),
        response_ids=np.array(ids[prompt:], np.int32),
        loss_mask=np.array(mask[prompt:], np.uint8),
        logprobs=np.array(logprobs[prompt:], np.float32),
        policy_versions=np.array(versions[prompt:], np.int32),
        reward=None,
        completion_ids=(),
    )
