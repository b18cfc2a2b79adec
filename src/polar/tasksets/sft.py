"""Fine-tuning datasets: accepted conversations as messages and as tokens, rejected ones, and pairs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

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
"""The label of tokens that trainers leave out of the loss."""


class Table(StrEnum):
    """The files of a dataset, which are its configurations for `datasets`."""

    SFT = "sft"
    """Accepted conversations as chat messages with tools."""
    TOKENS = "tokens"
    """The accepted conversations as sampled tokens."""
    REJECTED = "rejected"
    """Rejected conversations as chat messages."""
    PREFERENCE = "preference"
    """Pairs of one accepted and one rejected conversation of the same task."""

    @property
    def file(self) -> str:
        return f"{self}.parquet"


class Fate(StrEnum):
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DUPLICATE = "duplicate"
    """Another sample of the same task gave the same answers."""
    EMPTY = "empty"
    """Its agent never got an answer."""
    FAILED = "failed"
    """It has no reward, because it failed or was cancelled."""


@dataclass(frozen=True, slots=True)
class TaskSessions:
    """All attempts at one task, with what the dataset records about it."""

    task: str
    """The task's id in the taskset."""
    harness: str
    metadata: Mapping[str, JsonValue]
    attempts: Iterable[EndedSession]
    """The attempts in an order that does not depend on when they ended."""


class Maker(NamedTuple):
    """The harness and model that produced a session."""

    harness: str
    version: str | None
    """The harness's version; it and the model are None if the session ended before they were known."""
    model: str | None


@dataclass(slots=True)
class Yield:
    fates: Counter[Fate] = field(default_factory=Counter)
    sampled_tokens: int = 0
    trained_tokens: int = 0
    """The trained tokens of the accepted sessions."""


@dataclass(slots=True)
class Written:
    yields: dict[Maker, Yield] = field(default_factory=dict)
    rows: dict[Table, int] = field(default_factory=dict)
    tasks: int = 0
    tasks_accepted: int = 0
    """The number of tasks with at least one accepted conversation."""
    licences: Counter[str] = field(default_factory=Counter)
    """The number of tasks by licence, from their metadata; empty for tasks that state none."""
    unjudged: str | None = None
    """Why the condition could not be applied to a session, the first time that happened."""

    @property
    def fates(self) -> Counter[Fate]:
        return sum((made.fates for made in self.yields.values()), Counter())

    @property
    def trained_tokens(self) -> int:
        return sum(made.trained_tokens for made in self.yields.values())


def write_dataset(groups: Iterable[TaskSessions], directory: Path, accept: Condition) -> Written:
    """Write all tables, which appear under their names only once complete."""
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
        result = attempt.result
        maker = Maker(group.harness, result.harness_version, result.model)
        made = written.yields.setdefault(maker, Yield())
        made.fates[fate] += 1
        made.sampled_tokens += result.stats.sampled_tokens
        if fate not in mains:
            continue
        about = _provenance(group, result)
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
                made.trained_tokens += int(np.count_nonzero(conversation.trace.loss_mask))
        main = next((one for one in found if one.lineage is Lineage.MAIN), found[0])
        mains[fate].append((replace(main, trace=None), result))
    written.tasks += 1
    written.licences[_licence(group.metadata)] += 1
    written.tasks_accepted += bool(mains[Fate.ACCEPTED])
    for chosen, rejected in zip(mains[Fate.ACCEPTED], mains[Fate.REJECTED], strict=False):
        # The questions may differ in a date or a path, but not in their turns.
        if _roles(chosen[0]) == _roles(rejected[0]):
            row = _pair_row(group, *chosen, *rejected)
            files[Table.PREFERENCE].add(row, tokens=_size(chosen[0]) + _size(rejected[0]))


def _licence(metadata: Mapping[str, JsonValue]) -> str:
    return str(metadata.get("licence") or metadata.get("license") or "")


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
    """Estimate the memory of a row in tokens of about four characters."""
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
    """Return where a row comes from, without anything that depends on when or how fast it was made."""
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

_LICENCES = """
afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc
cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0
cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0
cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0 ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
gfdl gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 osl-3.0 pddl
postgresql unlicense wtfpl zlib
"""
LICENCES = frozenset(_LICENCES.split())
"""Licences of data and code that the hub knows; for any other, a card must say `other`."""

_HOW_TO_LOAD = """```python
from datasets import load_dataset

dataset = load_dataset("{place}", "sft", split="train")
```"""

Options = Sequence[tuple[str, object]]
"""Options of the command that made a dataset, without dashes; those without a value were not given."""
PUSH = "push-to-hub"
"""The option with the dataset's name on the hub."""


def card(name: str, written: Written, options: Options) -> str:
    """Return README.md: front matter for `load_dataset` and the Hugging Face hub, then facts for people."""
    sections = [
        f"---\n{yaml.safe_dump(_front_matter(name, written), sort_keys=False, allow_unicode=True)}---",
        f"# {name}",
        f"Made by `polar generate` (Polar {__version__}):",
        f"```bash\n{_command(options)}\n```",
        _table(("configuration", "rows", "holds"), [(t, written.rows.get(t, 0), _TABLES[t]) for t in Table]),
        _HOW_TO_LOAD.format(place=dict(options).get(PUSH) or "path/to/this"),
        "## Sessions",
        _table(
            ("harness", "version", "model", "sessions", *Fate, "sampled tokens", "trained tokens"),
            [
                (
                    *(_cell(part) for part in maker),
                    made.fates.total(),
                    *(made.fates[fate] for fate in Fate),
                    made.sampled_tokens,
                    made.trained_tokens,
                )
                for maker, made in written.yields.items()
            ],
        ),
        "Trained tokens are the sampled tokens of accepted sessions, in `tokens`.",
        "## Tasks",
        f"Tried: {written.tasks}. With an accepted session: {written.tasks_accepted}.",
        _table(("licence", "tasks"), [(_cell(name), count) for name, count in _licence_counts(written)]),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(name: str, written: Written) -> dict[str, Any]:
    rows = sum(written.rows.values())
    # `load_dataset` cannot read an empty table, and the hub shows every configuration listed.
    loadable = [table for table in Table if written.rows.get(table)] or list(Table)
    # The dataset's licence is stated only if every task states its own.
    is_licensed = bool(written.licences) and "" not in written.licences
    return {
        "pretty_name": name,
        **({"license": _hub_licences(written.licences)} if is_licensed else {}),
        "task_categories": ["text-generation"],
        "tags": ["polar", "agent", "sft", "preference"],
        "size_categories": [next((word for limit, word in _SIZES if rows < limit), "n>1M")],
        "configs": [
            {
                "config_name": table.value,
                "data_files": table.file,
                **({"default": True} if table is loadable[0] else {}),
            }
            for table in loadable
        ],
    }


def _hub_licences(licences: Iterable[str]) -> list[str]:
    return sorted({name.lower() if name.lower() in LICENCES else "other" for name in licences})


def _licence_counts(written: Written) -> list[tuple[str, int]]:
    return sorted((name or "not stated", count) for name, count in written.licences.items())


def _command(options: Options) -> str:
    given = [part for name, value in options if value is not None for part in (f"--{name}", str(value))]
    return shlex.join(["polar", "generate", *given])


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _cell(value: str | None) -> str:
    return "–" if value is None else value.replace("|", "\\|").replace("\n", " ")
