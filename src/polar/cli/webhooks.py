"""`polar webhooks`: where results are sent, how far that is, and what keeps it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from polar.cli.options import AsJson, Server, Token
from polar.cli.output import clock, print_list, table
from polar.client import Client
from polar.models.webhook import WebhookView


def webhooks(as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show the URLs that tasks want their results sent to, and how far each has got.

    LAG is how many results a receiver has still to take. The server tries until they are taken.

    Example: polar webhooks --json
    """
    with Client(server, token) as client:
        print_list(client.webhooks(), _webhook_table, as_json=as_json)


def _webhook_table(views: Iterable[WebhookView]) -> Table:
    rows = (
        (
            view.url,
            view.lag,
            f"{view.lag_seconds:.0f} s",
            view.failures,
            clock(view.delivered_at),
            clock(view.retry_at),
            view.error,
        )
        for view in views
    )
    return table(["URL", ">LAG", ">FOR", ">FAILURES", "DELIVERED", "AGAIN", "LAST ERROR"], rows)
