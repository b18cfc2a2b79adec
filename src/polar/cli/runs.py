"""`polar runs`: the named pieces of work that sessions belong to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table

from polar.cli.options import AsJson, Server, Token
from polar.cli.output import clock, print_list, table
from polar.client import Client
from polar.models.session import SessionStatus
from polar.models.task import RunKind
from polar.models.views import RunView

Kind = Annotated[RunKind | None, typer.Option(help="Only runs of this kind.")]


def runs(kind: Kind = None, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """List runs: trainings, evaluations, generations, submissions and those of other trainers.

    Examples:

      polar runs --kind training
      polar sessions --run NAME
    """
    with Client(server, token) as client:
        print_list(client.runs(kind), _table, as_json=as_json)


def _table(runs: Iterable[RunView]) -> Table:
    columns = ["RUN", "KIND", ">STEP", ">TASKS", ">SESSIONS", ">ENDED", ">FAILED", ">REWARD", "BEGAN", "LAST"]
    rows = (
        (
            run.name,
            run.kind,
            run.step,
            run.tasks,
            sum(run.sessions.values()),
            sum(count for status, count in run.sessions.items() if status.ended),
            run.sessions.get(SessionStatus.FAILED, 0),
            run.mean_reward,
            clock(run.created_at),
            clock(run.updated_at),
        )
        for run in runs
    )
    return table(columns, rows)
