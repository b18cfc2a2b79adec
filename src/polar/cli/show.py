"""`polar show` and `polar watch`: one session's conversation with its tokens, once it has ended or as it
grows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from polar.cli.branch import divergence_parts, replay_summary
from polar.cli.options import AsJson, Server, Token
from polar.cli.output import clock, console, print_json, print_json_line, print_parts, table, visible
from polar.cli.submit import INTERRUPTED
from polar.client import Client
from polar.engines.vocabulary import local_tokenizer, pieces
from polar.errors import InvalidInput, NotFound, concerning
from polar.models.chat import Message
from polar.models.completion import Completion
from polar.models.dashboard import (
    AnswerTokens,
    MessageLine,
    WatchedCall,
    WatchedSession,
    WatchEvent,
    WatchRestart,
)
from polar.models.session import SessionResult, SessionStatus
from polar.models.views import SessionView
from polar.recordings.recording import Recording, decode
from polar.trajectory.materialise import materialise

FOLDED_LINES = 6
FOLDED_CHARACTERS = 600


class Colour(StrEnum):
    """What the colour of a sampled token tells."""

    LOGPROB = "logprob"
    MASK = "mask"
    VERSION = "version"
    NONE = "none"


Tokenizers = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="PATH",
        help="A tokenizer.json or its directory. Default: the model's own, if it is on this machine.",
    ),
]


def show(
    session: Annotated[
        str, typer.Argument(metavar="SESSION", help="A session's id, or the path of a recording file.")
    ],
    full: Annotated[bool, typer.Option("--full", help="Long messages in full.")] = False,
    ids: Annotated[
        bool, typer.Option("--ids", help="A table of every sampled token: id, logprob, mask, version.")
    ] = False,
    color: Annotated[Colour, typer.Option(help="What a token's colour tells.")] = Colour.LOGPROB,
    tokenizer: Tokenizers = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also keep the recording in a file, for later.")
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Show what one session's agent said and did, token by token.

    First the outcome, then each model call: what was new in the request, and the sampled answer with
    every token coloured; last the traces a trainer gets.

    Examples:

      polar show SESSION --color mask
      polar show session.rec --ids --full
    """
    data = recording_bytes(session, server, token)
    if save is not None:
        try:
            save.write_bytes(data)
        except OSError as error:
            raise InvalidInput(f"--save: {save} cannot be written: {error.strerror}") from None
    with concerning(session):
        recording = decode(data)
    if as_json:
        print_json(_document(recording))
        return
    colour = color if console().color_system else Colour.NONE
    vocabulary = find_tokenizer(recording.result.model, tokenizer)
    for part in page(recording, vocabulary, colour=colour, full=full, ids=ids):
        print_parts(part)


def watch(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="A session's id.")],
    full: Annotated[bool, typer.Option("--full", help="Long messages in full.")] = False,
    color: Annotated[Colour, typer.Option(help="What a token's colour tells.")] = Colour.LOGPROB,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Follow what one session's agent says and does, token by token, until it ends.

    What was said before comes first, also of a session that has ended. Ctrl-C stops watching; the session
    goes on. The exit code tells how the session ended: 0 completed, 3 failed, 4 cancelled.

    Examples:

      polar watch SESSION
      polar watch SESSION --json | jq 'select(.kind == "call") | .response.content'
    """
    if color is Colour.MASK:
        raise InvalidInput(
            "--color mask: what is trained is known once a session has ended",
            hint=f"then ask: polar show {session} --color mask",
        )
    transcript = _Transcript(color if console().color_system else Colour.NONE, full)
    try:
        with Client(server, token) as client:
            for event in client.watch(session):
                if as_json:
                    print_json_line(event)
                else:
                    transcript.show(event)
                if isinstance(event, WatchedSession) and event.session.result is not None:
                    raise typer.Exit(_EXIT_CODES[event.session.status])
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


_EXIT_CODES = {SessionStatus.COMPLETED: 0, SessionStatus.FAILED: 3, SessionStatus.CANCELLED: 4}


class _Transcript:
    """Prints the events of a session that is watched, each below the one before."""

    def __init__(self, colour: Colour, full: bool) -> None:
        self._colour = colour
        self._full = full
        self._out = console()
        self._stage: tuple[SessionStatus, int] | None = None

    def show(self, event: WatchEvent) -> None:
        match event:
            case WatchedSession(session=session):
                self._show_session(session)
            case WatchRestart():
                self._print("\nThe session was told differently so far. From its beginning:", style="bold")
            case WatchedCall():
                self._show_call(event)

    def _show_session(self, session: SessionView) -> None:
        if session.result is not None:
            print_parts(Text(), _header(session.result, self._full))
        elif (stage := (session.status, session.attempt)) != self._stage:
            self._stage = stage
            where = f" on {session.node}" if session.node else ""
            self._print(f"{session.id} is {session.status}{where}, attempt {session.attempt}", style="dim")

    def _show_call(self, call: WatchedCall) -> None:
        goes_on = f", continues [{call.continues}]" if call.continues not in (None, call.index - 1) else ""
        self._print(f"\n[{call.index}] {call.id}{goes_on}", style="bold")
        for message in call.messages:
            self._show_message(message)
        self._print("assistant", style="bold green")
        self._print(self._answer(call, call.response))
        facts = [
            f"{call.given_tokens} tokens given",
            f"{len(call.ids)} sampled",
            f"finish {call.finish_reason}",
        ]
        facts += [f"untrainable: {call.untrainable}"] if call.untrainable else []
        self._print(" · ".join(facts), style="dim")

    def _show_message(self, message: MessageLine) -> None:
        self._print(message.role, style="bold blue")
        self._print(_text(_message_text(message), self._full))

    def _answer(self, tokens: AnswerTokens, message: MessageLine) -> Text:
        if tokens.texts is None:
            return _text(_message_text(message), full=True)
        values = tokens.versions if self._colour is Colour.VERSION else tokens.logprobs
        return _coloured(tokens.texts, [math.nan if it is None else it for it in values], self._colour)

    def _print(self, text: str | Text, *, style: str = "", end: str = "\n") -> None:
        shown = Text(visible(text), style=style) if isinstance(text, str) else text
        self._out.print(shown, end=end, soft_wrap=True)


def recording_bytes(session: str, server: str | None, token: str | None) -> bytes:
    path = Path(session)
    if "/" in session or path.is_file():
        try:
            return path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    # Whoever meant a path looks for no server.
    taken_for_session = f"{session}: no such file or directory here, and as a session"
    with concerning(taken_for_session):
        client = Client(server, token)
    with client:
        with concerning(taken_for_session):
            view = client.session(session)
        if view.result is None:
            raise NotFound(
                f"session {session} is {view.status}: it has no recording yet",
                hint=f"watch it with: polar watch {session}",
            )
        if not view.result.has_recording:
            reason = f": {view.result.error}" if view.result.error else ""
            raise NotFound(f"session {session} {view.status} without a recording{reason}")
        return client.recording(session)


def _document(recording: Recording) -> dict[str, Any]:
    """Everything in the recording as one JSON document."""
    trajectory = recording.trajectory
    return {
        "result": recording.result.model_dump(mode="json"),
        "completions": [asdict(completion) for completion in recording.completions],
        "traces": [asdict(materialise(trajectory, ref)) for ref in trajectory.traces],
    }


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
    """The session's outcome."""
    stats, seconds, verdict = result.stats, result.seconds, result.verdict
    versions = [v for v in (result.policy_version_min, result.policy_version_max) if v is not None]
    reward = None
    if verdict:
        components = ", ".join(f"{name} {value:g}" for name, value in verdict.components.items())
        reward = f"{verdict.reward:g}{_aside(components)}"
    rows = [
        ("task", f"{result.task_id}, sample {result.sample}, attempt {result.attempt}"),
        ("status", result.status + (f": {result.error}" if result.error else "")),
        ("reward", reward),
        ("agent", result.agent_end + ("" if result.exit_code is None else f", exit code {result.exit_code}")),
        ("began with", result.replay and replay_summary(result.replay)),
        ("model", result.model),
        ("logprobs", result.logprobs_mode),
        ("harness", result.harness_version),
        (
            "tokens",
            f"{stats.sampled_tokens} sampled = {stats.trainable_tokens} trainable + "
            f"{sum(stats.excluded.values())} excluded{_aside(_counts(stats.excluded))}",
        ),
        (
            "recorded",
            f"{stats.completions} model calls, {stats.traces} traces{_aside(_counts(stats.lineage))}",
        ),
        ("continued", _counts(stats.drift) or None),
        ("omitted", _counts(stats.omitted) or None),
        ("merged", f"{stats.trace_tokens} tokens, {stats.merge_ratio:.1f} × fewer than single requests"),
        *(("fault", f"{fault.completion or 'a completion'}: {fault.problem}") for fault in stats.faults),
        ("policy version", _range(versions)),
        ("artifacts", f"polar artifacts {result.session_id}" if result.has_artifacts else None),
        ("seconds", " · ".join(f"{stage} {spent:.1f}" for stage, spent in seconds)),
    ]
    parts: list[RenderableType] = [table(["SESSION", result.session_id], rows)]
    if verdict and verdict.report.strip():
        report = _inset(_text(verdict.report.strip(), full), 2)
        parts += [Text("\nEvaluator's report", style="bold"), report]
    if result.replay is not None:
        parts += divergence_parts(result.replay, full=full)
    return Group(*parts)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _aside(text: str) -> str:
    return f" ({text})" if text else ""


def trained_masks(recording: Recording) -> dict[str, NDArray[np.bool_]]:
    """The loss mask of each completion's sampled tokens, by its id."""
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
    columns = [">TRACE", ">PROMPT", ">RESPONSE", ">TRAINABLE", ">MEAN LOGPROB", ">VERSION", ">REWARD"]
    rows = []
    for index, ref in enumerate(recording.trajectory.traces):
        trace = materialise(recording.trajectory, ref)
        trained = trace.loss_mask.astype(bool)
        rows.append(
            (
                index,
                len(trace.prompt_ids),
                len(trace.response_ids),
                int(trained.sum()),
                f"{trace.logprobs[trained].mean():.3f}" if trained.any() else None,
                _range(trace.policy_versions[trained]),
                trace.reward,
                trace.lineage,
                trace.parent,
                ", ".join(trace.completion_ids),
            )
        )
    return table([*columns, "LINEAGE", ">FROM", "COMPLETIONS"], rows)


def _legend(recording: Recording, colour: Colour) -> Text:
    match colour:
        case Colour.LOGPROB:
            marks = [(label, floor) for floor, _, label in _LOGPROB_STEPS]
        case Colour.MASK:
            marks = [("trained", True), ("not trained", False)]
        case _:
            seen = {int(version) for c in recording.completions for version in c.policy_versions}
            marks = [(f"version {version}", version) for version in sorted(seen)]
    legend = Text(f"sampled tokens by {colour}: ")
    for label, value in marks:
        legend.append(f" {label} ", _style(colour, value))
    return legend


def _style(colour: Colour, value: float) -> Style:
    match colour:
        case Colour.LOGPROB:
            return Style(color=next((name for floor, name, _ in _LOGPROB_STEPS if value >= floor), "red"))
        case Colour.VERSION:
            return Style(color=_VERSION_COLOURS[int(value) % len(_VERSION_COLOURS)])
        case _:
            return Style(color="green") if value else _NO_VALUE


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
    if completion.untrainable:
        facts.append(f"untrainable: {completion.untrainable}")
    line = Text(f"[{completion.index}] {completion.id}", style="bold")
    if completion.started_at:
        line.append(f"  {clock(completion.started_at)}", Style(bold=False, dim=True))
    yield line
    yield _inset(Text(visible(" · ".join(facts)), style="dim"), 2)


def _messages(completion: Completion, parent: Completion | None, full: bool) -> Iterator[RenderableType]:
    """The messages since the parent's answer; all without a parent."""
    messages = completion.messages
    if parent is not None and len(messages) > len(parent.messages):
        # The message after the parent's request is its own answer, shown there with its tokens.
        messages = messages[len(parent.messages) + 1 :]
    elif completion.tools:
        names = ", ".join(tool.name for tool in completion.tools)
        yield _inset(Text(visible(f"tools offered: {names}"), style="dim"), 2)
    for message in messages:
        yield _inset(Text(message.role, style="bold blue"), 2)
        yield _inset(_text(_message_text(message), full), 4)


def _message_text(message: Message | MessageLine) -> str:
    calls = message.tool_calls if isinstance(message, Message) else message.calls
    parts = [message.reasoning and f"(reasoning) {message.reasoning}", message.content]
    parts += [f"→ {call.name}({call.arguments})" for call in calls]
    return "\n".join(part for part in parts if part)


def _response(
    completion: Completion, mask: NDArray[np.bool_], tokenizer: Tokenizer | None, colour: Colour
) -> Iterator[RenderableType]:
    yield _inset(Text("assistant", style="bold green"), 2)
    if tokenizer is None:
        yield _inset(_text(_message_text(completion.response), full=True), 4)
        yield _inset(Text("(no tokenizer here: this is the parsed message)", style="dim"), 4)
        return
    values: dict[Colour, NDArray[Any]] = {
        Colour.LOGPROB: completion.logprobs,
        Colour.MASK: mask,
        Colour.VERSION: completion.policy_versions,
    }
    texts = pieces(tokenizer, completion.sampled_ids.tolist())
    yield _inset(_coloured(texts, values.get(colour, completion.logprobs), colour), 4)


def _coloured(texts: Sequence[str], values: Sequence[float] | NDArray[Any], colour: Colour) -> Text:
    """Tokens, each in the colour of its value."""

    def style(at: int) -> Style | None:
        if colour is Colour.NONE:
            return None
        return _style(colour, values[at]) if at < len(values) else _NO_VALUE

    body = Text()
    for shown, run in groupby(range(len(texts)), key=style):
        body.append(visible("".join(texts[at] for at in run)), shown)
    return body


def _token_table(completion: Completion, mask: NDArray[np.bool_], tokenizer: Tokenizer | None) -> Table:
    ids = completion.sampled_ids.tolist()
    columns = (
        range(len(ids)),
        ids,
        [f"{logprob:.4f}" for logprob in completion.logprobs],
        mask.astype(int),
        completion.policy_versions,
        map(repr, pieces(tokenizer, ids)) if tokenizer else (),
    )
    return table([">#", ">ID", ">LOGPROB", ">MASK", ">VERSION", "TEXT"], zip_longest(*columns))


def _range(values: Sequence[int] | NDArray[np.int32]) -> str | None:
    if len(values) == 0:
        return None
    low, high = int(min(values)), int(max(values))
    return str(low) if low == high else f"{low}–{high}"


def _inset(part: RenderableType, columns: int) -> Padding:
    return Padding(part, (0, 0, 0, columns), expand=False)


def _text(text: str, full: bool) -> Text:
    return Text(visible(text if full else _fold(text)))


def _fold(text: str) -> str:
    lines = text.splitlines()
    kept = "\n".join(lines[:FOLDED_LINES])[:FOLDED_CHARACTERS]
    if len(kept) >= len("\n".join(lines)):
        return text
    return f"{kept}\n… {len(text) - len(kept)} more characters (--full shows all)"


def find_tokenizer(model: str | None, given: Path | None = None) -> Tokenizer | None:
    """The tokenizer at `given`, else the model's own if it can be had without a download."""
    path = local_tokenizer(model)
    if given is not None:
        path = given / "tokenizer.json" if given.is_dir() else given
        if not path.is_file():
            raise InvalidInput(
                f"--tokenizer: {path} does not exist", hint="name a tokenizer.json or its directory"
            )
    if path is None:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception on a malformed file
        raise InvalidInput(f"{path}: not a tokenizer: {error}") from None
