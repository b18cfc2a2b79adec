"""`polar verify`: checks that recordings are exact and that an engine agrees with their logprobs."""

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
        help="A session's id, a directory with recordings, or one recording.",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Engine to compare with. Default: the one in the settings, else start the embedded one.",
    ),
]
EngineKind = Annotated[
    str | None,
    typer.Option(metavar="vllm|sglang", help="API of the engine at --engine (default: vllm)."),
]
Model = Annotated[
    str | None, typer.Option(help="Model of the embedded engine. Default: that of the first recording.")
]
Tolerance = Annotated[float, typer.Option(min=0, help="Maximum accepted difference of a logprob.")]
Replay = Annotated[
    bool, typer.Option("--replay/--no-replay", help="Compare with an engine, or check only the invariants.")
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
    under a reason, and must follow exactly the tokens that the policy saw. Then an engine scores each trace,
    and the logprobs of its sampled tokens are compared with the recorded ones. Exits with 1 if any check
    fails.

    Tokens sampled at a temperature other than 1, or with top_p, top_k or a grammar, cannot be compared and
    are counted. The engine must have the weights that the tokens were sampled with.

    Examples:

      polar verify SESSION
      polar verify .polar --engine http://127.0.0.1:8000 --json
    """
    from polar.app.verification import summarise, verifications

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
    total = summarise(done, accepted)
    if as_json:
        documents = [one.document(accepted) for one in done]
        print_json({"sessions": documents, "total": total.document(accepted)})
    else:
        shown = [*done, total] if len(done) > 1 else done
        print_parts(table(COLUMNS, [_row(one, accepted) for one in shown]))
    if total.problems:
        raise typer.Exit(1)


def _settings(engine: dict[str, Any], model: str | None) -> Settings:
    """Return the settings of this directory; an embedded engine computes in single precision."""
    settings = load_settings(overrides={"engine": engine})
    if settings.engine.url is None:
        kind = "embedded" if settings.engine.kind == "auto" else None
        engine |= {"model": model, "dtype": "float32", "slots": 1, "kind": engine.get("kind") or kind}
        settings = load_settings(overrides={"engine": engine})
    # Separate from the data directory's own logs, which a running `polar serve` writes.
    return settings.model_copy(update={"data_dir": settings.data_dir / "verify"})


def _recordings(source: str, server: str | None, token: str | None) -> Iterator[tuple[str, bytes]]:
    from polar.app.verification import recording_files

    is_session = "/" not in source and not Path(source).exists()
    for name in [source] if is_session else map(str, recording_files(Path(source))):
        yield name, recording_bytes(name, server, token)


def _row(one: Verification, tolerance: float | None) -> tuple[object, ...]:
    from polar.app.verification import format_counts

    failure = one.failure(tolerance)
    compared = one.deltas.tokens
    not_compared = f"not compared: {format_counts(one.uncompared)}" if compared and one.uncompared else ""
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
    """Show progress while a person waits, and leave nothing of it on the screen."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda _text: None
        return
    with out.status("reading") as status:
        yield status.update
