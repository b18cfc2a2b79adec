"""`polar show`: one session's conversation with its tokens, masks and logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.cli.options import AsJson, Server, Token, connect, one_of
from polar.errors import InvalidInput, NotFound, PolarError

if TYPE_CHECKING:
    from polar.recordings.recording import Recording


def show(
    session: Annotated[
        str, typer.Argument(metavar="SESSION", help="A session's id, or the path of a recording file.")
    ],
    full: Annotated[bool, typer.Option("--full", help="Long messages in full.")] = False,
    ids: Annotated[
        bool, typer.Option("--ids", help="A table of every sampled token: id, logprob, mask, version.")
    ] = False,
    color: Annotated[
        str, typer.Option(help="What a token's colour tells: logprob, mask, version or none.")
    ] = "logprob",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A tokenizer.json or its directory. Default: the model's own, if it is on this machine.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also keep the recording in a file, for later.", show_default=False
        ),
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
    from polar.cli.output import concerning, console, print_json, print_parts
    from polar.cli.transcript import Colour, find_tokenizer, page
    from polar.recordings.recording import decode

    colour = one_of(Colour, color, "--color") or Colour.NONE
    data = recording_bytes(session, server, token)
    if save is not None:
        _save(data, save)
    with concerning(session):
        recording = decode(data)
    if as_json:
        print_json(_document(recording))
        return
    if not console().color_system:
        colour = Colour.NONE
    vocabulary = find_tokenizer(recording.result.model, tokenizer)
    for part in page(recording, vocabulary, colour=colour, full=full, ids=ids):
        print_parts(part)


def recording_bytes(session: str, server: str | None, token: str | None) -> bytes:
    path = Path(session)
    if "/" in session or path.is_file():
        try:
            return path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    with _taken_for_session(session):
        client = connect(server, token)
    with client:
        with _taken_for_session(session):
            view = client.session(session)
        if view.result is None:
            raise NotFound(
                f"session {session} is {view.status}: it has no recording yet",
                hint=f"watch it with: polar sessions {session}",
            )
        if not view.result.has_recording:
            reason = f": {view.result.error}" if view.result.error else ""
            raise NotFound(f"session {session} {view.status} without a recording{reason}")
        return client.recording(session)


@contextmanager
def _taken_for_session(name: str) -> Iterator[None]:
    """Errors raised inside say first that the name is no path: whoever meant one looks for no server."""
    try:
        yield
    except PolarError as error:
        error.message = f"{name}: no such file or directory here, and as a session: {error.message}"
        raise


def _save(data: bytes, path: Path) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InvalidInput(f"--save: {path} cannot be written: {error.strerror}") from None


def _document(recording: Recording) -> dict[str, Any]:
    """Everything in the recording as one JSON document."""
    from dataclasses import asdict

    from polar.trajectory.materialise import materialise

    trajectory = recording.trajectory
    return {
        "result": recording.result.model_dump(mode="json"),
        "completions": [asdict(completion) for completion in recording.completions],
        "traces": [asdict(materialise(trajectory, ref)) for ref in trajectory.traces],
    }
