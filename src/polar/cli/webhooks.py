"""`polar webhooks`: where results are sent, how far that is, and what keeps it."""

from __future__ import annotations

from polar.cli.options import AsJson, Server, Token, connect


def webhooks(as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show the URLs that tasks want their results sent to, and how far each has got.

    LAG is how many results a receiver has still to take. The server tries until they are taken.

    Example: polar webhooks --json
    """
    from polar.cli.output import clock, print_json_line, print_parts, table

    with connect(server, token) as client:
        views = client.webhooks()
    if as_json:
        for view in views:
            print_json_line(view)
        return
    rows = [
        (
            view.url,
            view.lag,
            f"{view.lag_seconds:.0f} s",
            view.failures,
            clock(view.delivered_at) if view.delivered_at is not None else None,
            clock(view.retry_at) if view.retry_at is not None else None,
            view.error,
        )
        for view in views
    ]
    columns = ("URL", "LAG", "FOR", "FAILURES", "DELIVERED", "AGAIN", "LAST ERROR")
    print_parts(table(columns, rows, numbers=("LAG", "FOR", "FAILURES")))
