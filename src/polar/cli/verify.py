"""`polar verify`: whether recordings keep their promises, and an engine agrees with their logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.cli.interruption import until_interrupted
from polar.cli.options import AsJson, Server, Token
from polar.cli.output import console, print_json, print_parts, table
from polar.cli.show import recording_bytes
from polar.config.settings import Settings, load_settings

if TYPE_CHECKING:
    from polar.app.stack import Say
    from polar.app.verification import Verification

COLUMNS = ["SESSION", ">TRACES", ">SAMPLED", ">TRAINED", ">COMPARED", ">MAX |Δ|", ">MEAN |Δ|", "", "NOTE"]

Source = Annotated[
    str,
    typer.Argument(
        metavar="SESSION|DIR|FILE",
        help="A session's id, a data directory or any other with recordings in it, or one recording.",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The engine to ask. Default: the one in the settings, else the embedded one is started.",
    ),
]
EngineKind = Annotated[
    str | None,
    typer.Option(metavar="vllm|sglang", help="What the engine at --engine speaks: vllm (default) or sglang."),
]
Model = Annotated[
    str | None, typer.Option(help="The embedded engine's model. Default: the one the first recording names.")
]
Tolerance = Annotated[float, typer.Option(min=0, help="The largest difference of a logprob to accept.")]
Replay = Annotated[
    bool, typer.Option("--replay/--no-replay", help="Ask an engine, or check the invariants only.")
]


def verify(
    source: Source,
    engine: Engine = None,
    engine_kind: EngineKind = None,
    model: Model = None,
    tolerance: Tolerance = 1e-3,
    replay: Replay = True,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Check what was recorded of sessions.

    A recording must match its checksum. Every sampled token must be trained in exactly one trace or counted
    under a reason, and stand there after exactly the tokens that the policy saw. Then each trace is scored by
    an engine, and the logprobs of its sampled tokens are compared with those recorded. Exits with 1 if
    anything does not hold.

    Tokens sampled at another temperature than 1, or with top_p, top_k or a grammar, cannot be compared
    and are counted. The engine must have the weights that the tokens were sampled with.

    Examples:

      polar verify SESSION
      polar verify .polar --engine http://127.0.0.1:8000 --json
    """
    from polar.app.verification import together, verifications

    recordings = _recordings(source, server, token)
    done: list[Verification] = []

    async def work(say: Say) -> None:
        def settings(recorded: str | None) -> Settings:
            return _settings({"url": engine, "kind": engine_kind}, model or recorded)

        async with aclosing(verifications(recordings, settings if replay else None, say)) as found:
            done.extend([one async for one in found])

    with _progress() as say:
        until_interrupted(work(say))
    accepted = tolerance if replay else None
    total = together(done, accepted)
    if as_json:
        documents = [one.document(accepted) for one in done]
        print_json({"sessions": documents, "total": total.document(accepted)})
    else:
        shown = [*done, total] if len(done) > 1 else done
        print_parts(table(COLUMNS, [_row(one, accepted) for one in shown]))
    if total.problems:
        raise typer.Exit(1)


def _settings(engine: dict[str, Any], model: str | None) -> Settings:
    """The settings of this directory; an embedded engine computes in single precision."""
    settings = load_settings(overrides={"engine": engine})
    if settings.engine.url is None:
        engine |= {"model": model, "dtype": "float32", "slots": 1}
        settings = load_settings(overrides={"engine": engine})
    # Beside the data directory's own logs, which a running `polar serve` writes.
    return settings.model_copy(update={"data_dir": settings.data_dir / "verify"})


def _recordings(source: str, server: str | None, token: str | None) -> Iterator[tuple[str, bytes]]:
    """The recordings with the names to show, read one at a time."""
    from polar.app.verification import recording_files

    is_session = "/" not in source and not Path(source).exists()
    for name in [source] if is_session else map(str, recording_files(Path(source))):
        yield name, recording_bytes(name, server, token)


def _row(one: Verification, tolerance: float | None) -> tuple[object, ...]:
    from polar.app.verification import counted

    failure = one.failure(tolerance)
    compared = one.deltas.tokens
    not_compared = f"not compared: {counted(one.uncompared)}" if compared and one.uncompared else ""
    return (
        one.name,
        one.traces,
        one.sampled_tokens,
        one.trained_tokens,
        None if tolerance is None else compared,
        one.deltas.max if compared else None,
        one.deltas.mean if compared else None,
        "failed" if failure else "ok",
        "; ".join(filter(None, [failure, not_compared, *one.notes])),
    )


@contextmanager
def _progress() -> Iterator[Say]:
    """Shows what is going on while a person waits; nothing of it stays."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda _text: None
        return
    with out.status("reading") as status:
        yield status.update
