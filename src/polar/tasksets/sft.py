"""Datasets to fine-tune on: accepted conversations as messages and as tokens, rejected ones, and pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from pydantic import JsonValue

from polar import __version__
from polar.models.session import SessionResult, SessionStatus
from polar.models.trace import Lineage, Trace
from polar.tasksets.conversations import SftConversation, conversations, digest
from polar.tasksets.expressions import CannotJudge, Condition, session_names
from polar.tasksets.parquet_file import ParquetFile, json_text, parquet_files
from polar.trajectory.learnable import EndedSession

NOT_TRAINED = -100
"""In `labels`: what trainers leave out of the loss."""


class Table(StrEnum):
    """The files of a dataset, and its configurations for `datasets`."""

    SFT = "sft"
    """Accepted conversations as chat messages with tools."""
    TOKENS = "tokens"
    """The same as the tokens that were sampled."""
    REJECTED = "rejected"
    """Conversations that were not accepted, as chat messages."""
    PREFERENCE = "preference"
    """Pairs of one accepted and one rejected conversation of the same task."""

    @property
    def file(self) -> str:
        return f"{self}.parquet"


class Fate(StrEnum):
    """What became of a session in the dataset."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DUPLICATE = "duplicate"
    """Another sample of the same task answered the same."""
    EMPTY = "empty"
    """Its agent never got an answer."""
    FAILED = "failed"
    """It has no reward; also those that were cancelled."""


@dataclass(frozen=True, slots=True)
class TaskSessions:
    """Everything that was tried of one task, with what a dataset says of it."""

    task: str
    """The task's id in the taskset."""
    harness: str
    metadata: Mapping[str, JsonValue]
    attempts: Iterable[EndedSession]
    """In an order that does not depend on when they ended."""


@dataclass(slots=True)
class Written:
    """What a dataset holds."""

    fates: Counter[Fate] = field(default_factory=Counter)
    rows: dict[Table, int] = field(default_factory=dict)
    tasks: int = 0
    tasks_accepted: int = 0
    """Those with at least one accepted conversation."""
    tokens: int = 0
    """Trained ones, of the accepted."""
    unjudged: str | None = None
    """Why the condition could not be applied to some session, the first time that it could not."""


def write_dataset(groups: Iterable[TaskSessions], directory: Path, accept: Condition) -> Written:
    """Write all tables, a group at a time; they appear under their names only when they are complete."""
    written = Written()
    with parquet_files(directory, {table: schema(table) for table in Table}) as files:
        for group in groups:
            _write_group(group, files, accept, written)
        written.rows = {table: files[table].count for table in Table}
    return written


def _write_group(
    group: TaskSessions, files: Mapping[str, ParquetFile], accept: Condition, written: Written
) -> None:
    seen: set[bytes] = set()
    mains: dict[Fate, list[tuple[SftConversation, SessionResult]]] = {Fate.ACCEPTED: [], Fate.REJECTED: []}
    for attempt in group.attempts:
        found = list(conversations(attempt.recording)) if attempt.recording is not None else []
        fate = _fate(group, attempt, found, seen, accept, written)
        written.fates[fate] += 1
        if fate not in mains:
            continue
        about = _provenance(group, attempt.result)
        table = files[Table.SFT if fate is Fate.ACCEPTED else Table.REJECTED]
        for number, conversation in enumerate(found):
            row = about | {"conversation": number, "lineage": conversation.lineage.value}
            chat = {
                "messages": conversation.messages,
                "tools": conversation.tools,
                "prompt_messages": conversation.prompt_messages,
            }
            table.add(chat | row, tokens=_size(conversation))
            if fate is Fate.ACCEPTED and conversation.trace is not None:
                files[Table.TOKENS].add(_token_row(conversation.trace) | row, tokens=_size(conversation))
                written.tokens += int(np.count_nonzero(conversation.trace.loss_mask))
        main = next((one for one in found if one.lineage is Lineage.MAIN), found[0])
        mains[fate].append((replace(main, trace=None), attempt.result))
    written.tasks += 1
    written.tasks_accepted += bool(mains[Fate.ACCEPTED])
    for chosen, rejected in zip(mains[Fate.ACCEPTED], mains[Fate.REJECTED], strict=False):
        # They answer the same question, which may differ in a date or a path, but not in its turns.
        if _roles(chosen[0]) == _roles(rejected[0]):
            row = _pair_row(group, *chosen, *rejected)
            files[Table.PREFERENCE].add(row, tokens=_size(chosen[0]) + _size(rejected[0]))


def _roles(conversation: SftConversation) -> list[str]:
    return [message["role"] for message in conversation.prompt]


def _fate(
    group: TaskSessions,
    attempt: EndedSession,
    found: list[SftConversation],
    seen: set[bytes],
    accept: Condition,
    written: Written,
) -> Fate:
    if attempt.result.status is not SessionStatus.COMPLETED:
        return Fate.FAILED
    if not found:
        return Fate.EMPTY
    answered = digest(found)
    if answered in seen:
        return Fate.DUPLICATE
    seen.add(answered)
    try:
        is_accepted = accept(session_names(attempt.result, group.task, group.metadata))
    except CannotJudge as error:
        written.unjudged = written.unjudged or f"session {attempt.result.session_id}: {error.message}"
        is_accepted = False
    return Fate.ACCEPTED if is_accepted else Fate.REJECTED


def _size(conversation: SftConversation) -> int:
    """How much memory a row takes, in tokens; a token is some four characters."""
    trace = conversation.trace
    if trace is not None:
        return len(trace.prompt_ids) + len(trace.response_ids)
    return sum(len(message["content"]) for message in conversation.messages) // 4


def _token_row(trace: Trace) -> dict[str, Any]:
    before = len(trace.prompt_ids)
    mask = np.concatenate([np.zeros(before, np.uint8), trace.loss_mask])
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    return {
        "input_ids": ids,
        "labels": np.where(mask == 1, ids, NOT_TRAINED).astype(np.int32),
        "loss_mask": mask,
        "logprobs": np.concatenate([np.zeros(before, np.float32), trace.logprobs]),
        "policy_versions": np.concatenate([np.full(before, -1, np.int32), trace.policy_versions]),
        "prompt_length": before,
    }


def _pair_row(
    group: TaskSessions,
    chosen: SftConversation,
    chosen_result: SessionResult,
    rejected: SftConversation,
    rejected_result: SessionResult,
) -> dict[str, Any]:
    return {
        "prompt": chosen.prompt,
        "chosen": chosen.answer,
        "rejected": rejected.answer,
        "tools": chosen.tools,
        "prompts_equal": chosen.prompt == rejected.prompt,
        "chosen_reward": chosen_result.reward,
        "rejected_reward": rejected_result.reward,
        "chosen_session": chosen_result.session_id,
        "rejected_session": rejected_result.session_id,
        "task": group.task,
        "harness": group.harness,
        "harness_version": chosen_result.harness_version,
        "model": chosen_result.model,
        "metadata": json_text(group.metadata),
    }


def _provenance(group: TaskSessions, result: SessionResult) -> dict[str, Any]:
    """Where a row comes from; nothing in it depends on when and how fast it was made."""
    stats = result.stats
    return {
        "task": group.task,
        "sample": result.sample,
        "session": result.session_id,
        "harness": group.harness,
        "harness_version": result.harness_version,
        "model": result.model,
        "policy_version_min": result.policy_version_min,
        "policy_version_max": result.policy_version_max,
        "reward": result.reward,
        "components": json_text(result.verdict.components if result.verdict else {}),
        "agent_end": result.agent_end.value,
        "completions": stats.completions,
        "sampled_tokens": stats.sampled_tokens,
        "trainable_tokens": stats.trainable_tokens,
        "metadata": json_text(group.metadata),
    }


def schema(table: Table) -> pa.Schema:
    """The columns of a table."""
    text, integer, number = pa.string(), pa.int64(), pa.float64()
    function = pa.struct([("name", text), ("arguments", text)])
    call = pa.struct([("id", text), ("type", text), ("function", function)])
    message = [("role", text), ("content", text), ("reasoning_content", text)]
    message += [("tool_calls", pa.list_(call)), ("tool_call_id", text), ("name", text)]
    messages = pa.list_(pa.struct(message))
    origin = [("task", text), ("sample", pa.int32()), ("session", text), ("conversation", pa.int32())]
    origin += [("lineage", text), ("harness", text), ("harness_version", text), ("model", text)]
    origin += [("policy_version_min", integer), ("policy_version_max", integer), ("reward", number)]
    origin += [("components", text), ("agent_end", text), ("completions", integer)]
    origin += [("sampled_tokens", integer), ("trainable_tokens", integer), ("metadata", text)]
    match table:
        case Table.SFT | Table.REJECTED:
            own = [("messages", messages), ("tools", text), ("prompt_messages", pa.int32())]
            return pa.schema(own + origin)
        case Table.TOKENS:
            ids = pa.list_(pa.int32())
            own = [("input_ids", ids), ("labels", ids), ("loss_mask", pa.list_(pa.uint8()))]
            own += [("logprobs", pa.list_(pa.float32())), ("policy_versions", ids)]
            return pa.schema([*own, ("prompt_length", pa.int32()), *origin])
        case Table.PREFERENCE:
            own = [("prompt", messages), ("chosen", messages), ("rejected", messages), ("tools", text)]
            own += [("prompts_equal", pa.bool_()), ("chosen_reward", number), ("rejected_reward", number)]
            own += [("chosen_session", text), ("rejected_session", text), ("task", text), ("harness", text)]
            return pa.schema([*own, ("harness_version", text), ("model", text), ("metadata", text)])


CARD = "README.md"
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))

_TABLES = {
    Table.SFT: "accepted conversations: `messages` and `tools` (JSON text), the first `prompt_messages` of"
    " them the prompt",
    Table.TOKENS: "the same as tokens: `input_ids`, `labels` (-100 where not sampled), `loss_mask`,"
    " `logprobs`, `policy_versions`",
    Table.REJECTED: "conversations that were not accepted, as `messages`",
    Table.PREFERENCE: "pairs of the same task: `prompt`, `chosen`, `rejected`",
}


_HOW_TO_LOAD = """```python
from datasets import load_dataset

dataset = load_dataset("path/to/this", "sft", split="train")
```"""


def card(name: str, written: Written, made_with: Mapping[str, Any]) -> str:
    """README.md: front matter for `load_dataset`, then the facts."""
    rows = sum(written.rows.values())
    front = {
        "pretty_name": name,
        "task_categories": ["text-generation"],
        "tags": ["polar", "agent", "sft", "preference"],
        "size_categories": [next((word for limit, word in _SIZES if rows < limit), "n>1M")],
        "configs": [
            {
                "config_name": table.value,
                "data_files": table.file,
                **({"default": True} if table is Table.SFT else {}),
            }
            for table in Table
        ],
    }
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {name}",
        f"Made by `polar generate` (Polar {__version__}).",
        _table(("configuration", "rows", "holds"), [(t, written.rows.get(t, 0), _TABLES[t]) for t in Table]),
        _table(
            ("made with", ""),
            [(f"{key}", f"`{_cell(value)}`") for key, value in made_with.items() if value is not None],
        ),
        _table(
            ("sessions", ""),
            [
                *((fate, written.fates.get(fate, 0)) for fate in Fate),
                ("tasks", written.tasks),
                ("tasks with an accepted session", written.tasks_accepted),
                ("trained tokens", written.tokens),
            ],
        ),
        _HOW_TO_LOAD,
    ]
    return "\n\n".join(sections) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    """What stands inside backticks in a table: neither may end there."""
    return str(value).replace("`", "'").replace("|", "\\|").replace("\n", " ")
