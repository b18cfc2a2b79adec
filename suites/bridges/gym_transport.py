"""NeMo Gym's transport of captured tokens over the gateway's capture log: one log a rollout."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from polar.errors import PolarError
from polar.models.chat import FinishReason, Message, Role
from polar.models.completion import Completion
from polar.recordings.capture import CaptureWriter
from tests.captures import read_capture

ENTRY = "gym_entry"
"""In a completion's extra: what Gym records of a call beside its tokens."""
TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
CAPTURE = "nemo_gym.token_id_capture"


class Refused(PolarError):
    """A record that contradicts one that is there, or comes after its rollout was frozen."""


class CaptureTransport:
    """A sink, a source and a resolver: each instance is a client of its own over one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def put(self, entry: Any) -> None:
        known = {one.model_call_id: one for one in self._entries(entry.rollout_id)}
        if entry == known.get(entry.model_call_id):
            return
        if entry.model_call_id in known or self._frozen(entry.rollout_id).exists():
            raise Refused(f"rollout {entry.rollout_id}: call {entry.model_call_id} cannot be written")
        self._append(entry.rollout_id, completion_of(entry))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        lost = completion(f"lost-{uuid4().hex}", [], [], [], untrainable=f"{model_call_id} was not captured")
        self._append(rollout_id, lost)

    async def freeze(self, rollout_id: str) -> Any:
        frozen = self._frozen(rollout_id)
        if not frozen.exists():
            frozen.write_text(uuid4().hex)
        written = self._completions(rollout_id)
        return importlib.import_module(f"{CAPTURE}.protocols").TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=tuple(self._entries(rollout_id)),
            incomplete=any(one.untrainable for one in written),
            snapshot_id=frozen.read_text(),
            version=len(written),
        )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        frozen = await self.freeze(rollout_id)
        if (frozen.snapshot_id, frozen.version) != (snapshot_id, version):
            return False
        self._log(rollout_id).unlink()
        return True

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        lineage = importlib.import_module(f"{CAPTURE}.lineage").RolloutLineage()
        for entry in self._entries(rollout_id):
            lineage.add_entry(entry)
        return lineage.resolve(request_items)

    def is_process_shared(self) -> bool:
        return True

    async def close(self) -> None: ...

    def _log(self, rollout_id: str) -> Path:
        return self._directory / f"{rollout_id}.capture"

    def _frozen(self, rollout_id: str) -> Path:
        return self._directory / f"{rollout_id}.frozen"

    def _completions(self, rollout_id: str) -> list[Completion]:
        log = self._log(rollout_id)
        return read_capture(log) if log.exists() else []

    def _entries(self, rollout_id: str) -> list[Any]:
        return [entry_of(one) for one in self._completions(rollout_id) if ENTRY in one.extra]

    def _append(self, rollout_id: str, one: Completion) -> None:
        log = CaptureWriter(self._log(rollout_id))
        log.append(one)
        log.close()


def completion_of(entry: Any) -> Completion:
    made = completion(entry.model_call_id, *(getattr(entry, name) for name in TOKENS))
    made.extra[ENTRY] = entry.model_copy(update={name: [] for name in TOKENS}).model_dump_json()
    return made


def entry_of(one: Completion) -> Any:
    entry = importlib.import_module(f"{CAPTURE}.records").TokenEntry.model_validate_json(one.extra[ENTRY])
    tokens = (one.prompt_ids.tolist(), one.sampled_ids.tolist(), decimals(one.logprobs))
    return entry.model_copy(update=dict(zip(TOKENS, tokens, strict=True)))


def decimals(logprobs: Any) -> list[float]:
    """The shortest numbers that are these in single precision, as JSON has them."""
    return [float(str(one)) for one in logprobs]


def completion(
    id: str, prompt: list[int], sampled: list[int], logprobs: list[float], untrainable: str | None = None
) -> Completion:
    return Completion(
        id=id,
        index=0,
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.array(logprobs, np.float32),
        policy_versions=np.zeros(len(sampled), np.int32),
        messages=(),
        response=Message(Role.ASSISTANT, ""),
        finish_reason=FinishReason.STOP,
        untrainable=untrainable,
    )
