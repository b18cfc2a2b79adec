"""`polar branch` and `polar replay`: ended sessions begun again from what was recorded of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from polar.cli.options import AsJson, Server, Token
from polar.cli.output import counted, print_json, print_list, print_parts, visible
from polar.cli.sessions import session_table
from polar.cli.submit import exit_if_failed, follow, interruptible
from polar.client import Client
from polar.errors import Backoff, InvalidInput, retry
from polar.models.session import Divergence, ReplayReport, SessionResult
from polar.models.task import BudgetScope, OnDivergence
from polar.models.views import SessionView

T = TypeVar("T")

LEFT = "what was begun goes on. `polar sessions` shows it, and `polar sessions cancel SESSION` ends it"

FOLDED_DIFF = 40
"""Lines of a diff that are shown unless all are asked for."""
LOST_ANSWER = Backoff(0.5, 2.0, attempts=4)
"""How often a request is made again whose answer may have been lost."""

SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="The id of an ended session.")]
_DIVERGENCE = (
    "What becomes of a request that is not the recorded one. stop: the agent is ended there. live: the model"
    " answers it and what follows. recorded: it gets the recorded answer anyway, which is never trained."
)

_BUDGETS = (
    "What of a branch the task's budgets count. new: what it adds. session: its beginning too, so that it"
    " ends where a sample with that beginning would."
)


def branch(
    session: SessionId,
    at: Annotated[
        int, typer.Option(min=0, metavar="K", help="Model calls that are answered from the recording.")
    ],
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Branches that leave the session there.")] = 1,
    on_divergence: Annotated[OnDivergence, typer.Option(help=_DIVERGENCE)] = OnDivergence.LIVE,
    budgets: Annotated[BudgetScope, typer.Option(help=_BUDGETS)] = BudgetScope.NEW,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Add sessions to a task that begin as one of its ended sessions did, and go on by themselves.

    Each runs in a sandbox of its own. Its first K model calls are answered from the recording, which costs no
    sampling, while its tools run again; then the model samples. `polar show SESSION` numbers the calls from
    0: with --at 3 the calls 0, 1 and 2 are answered from the recording, and 3 is sampled anew.

    It stays until the branches have ended; exits with 1 if one failed.

    With --json: one session a line.

    Example: polar branch fix-typo.0 --at 3 --samples 4
    """
    with interruptible(LEFT), Client(server, token) as client:
        ended = client.session(session).result
        if ended is not None and 0 < ended.stats.completions <= at:
            raise InvalidInput(f"--at: must be below {ended.stats.completions}, its number of model calls")
        ways = _ways(on_divergence)
        added = _asked(lambda: client.branch(session, at, samples, budgets=budgets, **ways))
        views = _views(client, added)
    print_list(views, session_table, as_json=as_json)
    results = [view.result for view in views if view.result is not None]
    if not as_json:
        print_parts("", *_divergence_notes(results))
    exit_if_failed(results)


def replay(
    session: SessionId,
    until: Annotated[
        int | None, typer.Option(min=0, metavar="K", help="End the agent after K model calls (default: all).")
    ] = None,
    on_divergence: Annotated[OnDivergence, typer.Option(help=_DIVERGENCE)] = OnDivergence.STOP,
    full: Annotated[bool, typer.Option("--full", help="Long diffs in full.")] = False,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Run an ended session again, with its model calls answered from its recording.

    The same task, harness and sandbox, as the only session of a copy of its task. Tools run again, and no
    token is sampled as long as the agent asks what it asked before. A request that is not the recorded one,
    because of a random name or a race in what a tool printed, say, is a divergence: it is shown as a diff
    of the two requests.

    Exits with 1 if there was a divergence, a recorded answer was never asked for, or the session failed.

    With --json: the session, whose result holds the report under `replay`.

    Examples:

      polar replay fix-typo.0
      polar replay fix-typo.0 --until 3 --on-divergence live
    """
    with interruptible(LEFT), Client(server, token) as client:
        client.session(session)
        ways = _ways(on_divergence)
        begun = _asked(lambda: client.replay(session, until, **ways))
        (view,) = _views(client, [begun])
    assert view.result is not None
    report = view.result.replay
    if as_json:
        print_json(view)
    else:
        print_parts(session_table([view]), "", *replay_parts(view.result, full=full))
    exit_if_failed([view.result])
    if report is None or not report.is_faithful:
        raise typer.Exit(1)


def _ways(on_divergence: OnDivergence) -> dict[str, Any]:
    """How sessions begin again, under an id by which the request can be made twice."""
    return {
        "on_divergence": on_divergence,
        "request_id": secrets.token_hex(8),
    }


def _asked(ask: Callable[[], T]) -> T:
    """The answer to a request that is safe to repeat: should the first one be lost, it is asked for again."""
    return retry(ask, LOST_ANSWER)


def _views(client: Client, begun: Sequence[SessionView]) -> list[SessionView]:
    """These sessions once they have ended."""
    ids = [view.id for view in begun]
    follow(client, [begun[0].task_id], len(ids), ids)
    return [client.session(id) for id in ids]


def _divergence_notes(results: Sequence[SessionResult]) -> list[RenderableType]:
    """A line for each branch that did not follow the recording to where it was to leave it."""
    return [
        f"{result.session_id}: {replay_summary(report)}; polar show {result.session_id} tells more"
        for result in results
        if (report := result.replay) and not report.is_faithful
    ]


def replay_summary(report: ReplayReport) -> str:
    """How far a session followed the recording that it began with, in one line."""
    parts = [
        f"{counted(report.calls, 'model call')} of {report.origin}",
        counted(report.sampled_tokens, "token"),
        *([f"{counted(report.varied_messages, 'message')} varied"] if report.varied_messages else []),
        *([counted(report.divergence_count, "divergence")] if report.divergence_count else []),
        *([f"{counted(report.unused_calls, 'answer')} never asked for"] if report.unused_calls else []),
    ]
    return ", ".join(parts)


def replay_parts(result: SessionResult, *, full: bool) -> Iterator[RenderableType]:
    """What came of a replay: how far it got, and each difference that was found."""
    report = result.replay
    if report is None:
        yield "nothing was replayed"
        return
    yield f"answered from the recording: {replay_summary(report)}"
    yield from divergence_parts(report, full=full)
    yield "it replays to the end" if report.is_faithful else "it does not replay"


_TAKEN = {
    OnDivergence.STOP: "the agent was ended",
    OnDivergence.LIVE: "the model answered",
    OnDivergence.RECORDED: "the recorded answer was given",
}


def divergence_parts(report: ReplayReport, *, full: bool) -> Iterator[RenderableType]:
    """What varied, and the requests that were not the recorded ones, each with its diff."""
    if report.variations:
        yield Text("\n".join(map(visible, report.variations)), style="dim")
    for one in report.divergences:
        what = f"model call {one.call} is not the recorded one; {_TAKEN[one.taken]}"
        told = "the harness has another version" if one.call is None else what
        yield Text(f"\n{told}", style="bold")
        yield Padding(_diff(one, full), (0, 0, 0, 2), expand=False)
    if more := report.divergence_count - len(report.divergences):
        yield f"\nand {counted(more, 'divergence')} more"
    if report.divergences:
        yield ""


def _diff(divergence: Divergence, full: bool) -> Text:
    lines = divergence.difference.splitlines()
    shown = lines if full else lines[:FOLDED_DIFF]
    text = Text("\n").join(Text(visible(line), _COLOURS.get(line[:1], "")) for line in shown)
    if len(shown) < len(lines):
        text.append(f"\n… {len(lines) - len(shown)} more lines (--full shows all)")
    return text


_COLOURS = {"+": "green", "-": "red", "@": "dim"}
