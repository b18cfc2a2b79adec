"""A session's recording as a page for people: what was said, token by token, and what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from polar.cli.output import clock, table, visible
from polar.engines.vocabulary import local_tokenizer, pieces
from polar.errors import InvalidInput
from polar.models.chat import Message
from polar.models.completion import Completion
from polar.models.session import SessionResult
from polar.trajectory.materialise import materialise

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from polar.recordings.recording import Recording

FOLDED_LINES = 6
FOLDED_CHARACTERS = 600


class Colour(StrEnum):
    """What the colour of a sampled token tells."""

    LOGPROB = "logprob"
    MASK = "mask"
    VERSION = "version"
    NONE = "none"


_LOGPROB_STEPS = (
    (-0.105, "green", "p ≥ 0.9"),
    (-0.693, "yellow", "p ≥ 0.5"),
    (-2.303, "magenta", "p ≥ 0.1"),
    (-np.inf, "red", "p < 0.1"),
)
_VERSION_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_NO_VALUE = Style(dim=True)


def page(
    recording: Recording, tokenizer: Tokenizer | None, *, colour: Colour, full: bool, ids: bool
) -> Iterator[RenderableType]:
    """The parts of the page, top to bottom."""
    yield _header(recording.result, full)
    if colour is not Colour.NONE:
        yield Text()
        yield _legend(recording, colour)
    masks = trained_masks(recording)
    known = {completion.id: completion for completion in recording.completions}
    for completion in recording.completions:
        mask = masks[completion.id]
        yield Text()
        yield from _facts(completion, mask)
        yield from _messages(completion, known.get(completion.parent or ""), full)
        yield from _response(completion, mask, tokenizer, colour)
        if ids:
            yield _inset(_token_table(completion, mask, tokenizer), 4)
    yield Text()
    yield _trace_table(recording)


def _header(result: SessionResult, full: bool) -> RenderableType:
    """What came of the session."""
    stats, seconds, verdict = result.stats, result.seconds, result.verdict
    excluded = ", ".join(f"{count} {reason}" for reason, count in sorted(stats.excluded.items()))
    components = (
        ", ".join(f"{name} {value:g}" for name, value in verdict.components.items()) if verdict else ""
    )
    agent = result.agent_end + (f", exit code {result.exit_code}" if result.exit_code is not None else "")
    versions = [v for v in (result.policy_version_min, result.policy_version_max) if v is not None]
    rows = [
        ("task", f"{result.task_id}, sample {result.sample}, attempt {result.attempt}"),
        ("status", result.status + (f": {result.error}" if result.error else "")),
        (
            "reward",
            None if verdict is None else f"{verdict.reward:g}" + (f" ({components})" if components else ""),
        ),
        ("agent", agent),
        ("model", result.model),
        ("logprobs", result.logprobs_mode),
        ("harness", result.harness_version),
        (
            "tokens",
            f"{stats.sampled_tokens} sampled = {stats.trainable_tokens} trainable + "
            f"{sum(stats.excluded.values())} excluded" + (f" ({excluded})" if excluded else ""),
        ),
        ("recorded", f"{stats.completions} model calls, {stats.traces} traces{_counted(stats.lineage)}"),
        ("continued", _counted(stats.drift).strip(" ()") or None),
        ("omitted", _counted(stats.omitted).strip(" ()") or None),
        ("merged", f"{stats.trace_tokens} tokens, {stats.merge_ratio:.1f} × fewer than single requests"),
        *(("fault", f"{fault.completion or 'a completion'}: {fault.problem}") for fault in stats.faults),
        ("policy version", _range(versions)),
        ("artifacts", f"polar artifacts {result.session_id}" if result.has_artifacts else None),
        (
            "seconds",
            f"init {seconds.init:.1f} · ready {seconds.ready:.1f} · running {seconds.running:.1f} · "
            f"postrun {seconds.postrun:.1f}",
        ),
    ]
    parts: list[RenderableType] = [table(["SESSION", result.session_id], rows)]
    if verdict and verdict.report.strip():
        parts += [
            Text("\nEvaluator's report", style="bold"),
            _inset(_text(verdict.report.strip(), full), 2),
        ]
    return Group(*parts)


def _counted(counts: dict[str, int]) -> str:
    """` (2 main, 1 subagent)`, or nothing."""
    return f" ({', '.join(f'{count} {name}' for name, count in sorted(counts.items()))})" if counts else ""


def trained_masks(recording: Recording) -> dict[str, NDArray[np.bool_]]:
    """Completion id → which of its sampled tokens carry loss in some trace."""
    trajectory = recording.trajectory
    trained = {index for ref in trajectory.traces for index in ref.trained}
    runs: dict[str, list[NDArray[np.bool_]]] = {}
    for index, segment in enumerate(trajectory.segments):
        if segment.completion_id is not None:
            runs.setdefault(segment.completion_id, []).append(np.full(len(segment.ids), index in trained))
    masks = {}
    for completion in recording.completions:
        mask = np.zeros(len(completion.sampled_ids), np.bool_)
        if completion.id in runs:
            held = np.concatenate(runs[completion.id])[: len(mask)]
            mask[: len(held)] = held
        masks[completion.id] = mask
    return masks


def _trace_table(recording: Recording) -> Table:
    trajectory = recording.trajectory
    rows = []
    for index, ref in enumerate(trajectory.traces):
        trace = materialise(trajectory, ref)
        trained = trace.loss_mask.astype(bool)
        mean = float(trace.logprobs[trained].mean()) if trained.any() else None
        rows.append(
            (
                index,
                len(trace.prompt_ids),
                len(trace.response_ids),
                int(trained.sum()),
                None if mean is None else f"{mean:.3f}",
                _range(trace.policy_versions[trained]),
                trace.reward,
                trace.lineage,
                trace.parent,
                ", ".join(trace.completion_ids),
            )
        )
    numbers = ["TRACE", "PROMPT", "RESPONSE", "TRAINABLE", "MEAN LOGPROB", "VERSION", "REWARD"]
    return table([*numbers, "LINEAGE", "FROM", "COMPLETIONS"], rows, numbers=[*numbers, "FROM"])


def _legend(recording: Recording, colour: Colour) -> Text:
    match colour:
        case Colour.LOGPROB:
            marks = [(label, Style(color=name)) for _, name, label in _LOGPROB_STEPS]
        case Colour.MASK:
            marks = [("trained", _mask_style(True)), ("not trained", _mask_style(False))]
        case Colour.VERSION:
            seen = {int(version) for c in recording.completions for version in c.policy_versions}
            marks = [(f"version {version}", _version_style(version)) for version in sorted(seen)]
        case Colour.NONE:
            marks = []
    legend = Text(f"sampled tokens by {colour}: ")
    for label, style in marks:
        legend.append(f" {label} ", style)
    return legend


def _facts(completion: Completion, mask: NDArray[np.bool_]) -> Iterator[RenderableType]:
    facts = [
        f"{completion.prompt_tokens} prompt tokens",
        f"{completion.sampled_tokens} sampled",
        f"{int(mask.sum())} trained",
        f"finish {completion.finish_reason}",
    ]
    if len(completion.logprobs):
        facts.append(f"logprob mean {completion.logprobs.mean():.2f}, min {completion.logprobs.min():.2f}")
    if len(completion.policy_versions):
        facts.append(f"version {_range(completion.policy_versions)}")
    if completion.ended_at > completion.started_at:
        facts.append(f"{completion.ended_at - completion.started_at:.1f} s")
    if completion.kind != "generation":
        facts.append(completion.kind)
    if completion.untrainable:
        facts.append(f"untrainable: {completion.untrainable}")
    line = Text(f"[{completion.index}] {completion.id}", style="bold")
    if completion.started_at:
        line.append(f"  {clock(completion.started_at)}", Style(bold=False, dim=True))
    yield line
    yield _inset(Text(visible(" · ".join(facts)), style="dim"), 2)


def _messages(completion: Completion, parent: Completion | None, full: bool) -> Iterator[RenderableType]:
    """What the harness said since the parent's answer; everything where there is no parent."""
    messages = completion.messages
    if parent is not None and len(messages) > len(parent.messages):
        # The message after the parent's request is its own answer, shown there with its tokens.
        messages = messages[len(parent.messages) + 1 :]
    elif completion.tools:
        names = ", ".join(tool.name for tool in completion.tools)
        yield _inset(Text(visible(f"tools offered: {names}"), style="dim"), 2)
    for message in messages:
        yield _inset(Text(message.role, style="bold blue"), 2)
        yield _inset(_text(_said(message), full), 4)


def _said(message: Message) -> str:
    parts = [message.reasoning and f"(reasoning) {message.reasoning}", message.content]
    parts += [f"→ {call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(part for part in parts if part)


def _response(
    completion: Completion, mask: NDArray[np.bool_], tokenizer: Tokenizer | None, colour: Colour
) -> Iterator[RenderableType]:
    yield _inset(Text("assistant", style="bold green"), 2)
    if tokenizer is None:
        yield _inset(_text(_said(completion.response), full=True), 4)
        yield _inset(Text("(no tokenizer here: this is the parsed message)", style="dim"), 4)
        return
    body = Text()
    texts = pieces(tokenizer, completion.sampled_ids.tolist())
    for style, run in groupby(range(len(texts)), key=_styles(completion, mask, colour)):
        body.append(visible("".join(texts[at] for at in run)), style)
    yield _inset(body, 4)


def _styles(completion: Completion, mask: NDArray[np.bool_], colour: Colour) -> Callable[[int], Style | None]:
    """Position of a sampled token → its style."""
    logprobs, versions = completion.logprobs, completion.policy_versions
    match colour:
        case Colour.LOGPROB:
            return lambda at: _logprob_style(float(logprobs[at])) if at < len(logprobs) else _NO_VALUE
        case Colour.MASK:
            return lambda at: _mask_style(bool(mask[at]))
        case Colour.VERSION:
            return lambda at: _version_style(int(versions[at])) if at < len(versions) else _NO_VALUE
        case Colour.NONE:
            return lambda at: None


def _logprob_style(logprob: float) -> Style:
    return Style(color=next((name for floor, name, _ in _LOGPROB_STEPS if logprob >= floor), "red"))


def _mask_style(is_trained: bool) -> Style:
    return Style(color="green") if is_trained else _NO_VALUE


def _version_style(version: int) -> Style:
    return Style(color=_VERSION_COLOURS[version % len(_VERSION_COLOURS)])


def _token_table(completion: Completion, mask: NDArray[np.bool_], tokenizer: Tokenizer | None) -> Table:
    ids = completion.sampled_ids.tolist()
    texts = pieces(tokenizer, ids) if tokenizer else [""] * len(ids)
    rows = [
        (
            at,
            token,
            _at(completion.logprobs, at, "{:.4f}"),
            int(mask[at]),
            _at(completion.policy_versions, at, "{}"),
            repr(texts[at]) if tokenizer else None,
        )
        for at, token in enumerate(ids)
    ]
    numbers = ["#", "ID", "LOGPROB", "MASK", "VERSION"]
    return table([*numbers, "TEXT"], rows, numbers=numbers)


def _at(values: NDArray[np.generic], at: int, form: str) -> str | None:
    return form.format(values[at]) if at < len(values) else None


def _range(values: Sequence[int] | NDArray[np.int32]) -> str | None:
    if len(values) == 0:
        return None
    low, high = int(min(values)), int(max(values))
    return str(low) if low == high else f"{low}–{high}"


def _inset(part: RenderableType, columns: int) -> Padding:
    return Padding(part, (0, 0, 0, columns), expand=False)


def _text(text: str, full: bool) -> Text:
    return Text(visible(text if full else _folded(text)))


def _folded(text: str) -> str:
    lines = text.splitlines()
    kept = "\n".join(lines[:FOLDED_LINES])[:FOLDED_CHARACTERS]
    if len(kept) >= len("\n".join(lines)):
        return text
    return f"{kept}\n… {len(text) - len(kept)} more characters (--full shows all)"


def find_tokenizer(model: str | None, given: Path | None = None) -> Tokenizer | None:
    """The tokenizer at `given`, else the model's own if it can be had without a download."""
    from tokenizers import Tokenizer

    path = _given_file(given) if given is not None else local_tokenizer(model)
    if path is None:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception on a malformed file
        raise InvalidInput(f"{path}: not a tokenizer: {error}") from None


def _given_file(given: Path) -> Path:
    path = given / "tokenizer.json" if given.is_dir() else given
    if not path.is_file():
        raise InvalidInput(
            f"--tokenizer: {path} does not exist", hint="name a tokenizer.json or its directory"
        )
    return path
