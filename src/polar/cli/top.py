"""`polar top`: shows the running system live in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polar.app.vitals import PoolSigns, Snapshot, Vitals
from polar.cli.node import node_table
from polar.cli.options import AsJson, Server, Token
from polar.cli.output import console, print_json_line, print_parts, table, visible
from polar.client import Client
from polar.errors import Unavailable
from polar.models.session import SessionStatus

BAR = 20


def top(
    interval: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Measure one interval, print it, and exit.")] = False,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Show nodes, pools, throughput, rewards, the policy and the engines, until Ctrl-C.

    A read-only token is enough. Pools, tokens per second and engines are those of the server's own process;
    other nodes have their own `/metrics`.

    Example: polar top --once --json
    """
    with Client(server, token) as client:
        looks = _updates(client, interval)
        if not (once or as_json):
            _watch(looks, client.server)
            return
        for found in looks:
            if isinstance(found, Unavailable):
                raise found
            if as_json:
                print_json_line(found)
            else:
                print_parts(*_parts(found, client.server))
            if once:
                return


def _updates(client: Client, interval: float) -> Iterator[Vitals | Unavailable]:
    """Yield the state of the server at each update, or why it could not be read; the first must succeed."""
    before = Snapshot.of_server(client)
    while True:
        time.sleep(interval)
        try:
            now = Snapshot.of_server(client)
        except Unavailable as error:
            yield error
        else:
            yield Vitals.between(before, now)
            before = now


def _watch(looks: Iterator[Vitals | Unavailable], server: str) -> None:
    """Update the display until Ctrl-C, even while the server is unreachable."""
    with Live(console=console(), screen=True, auto_refresh=False) as live:
        try:
            for found in looks:
                if isinstance(found, Unavailable):
                    live.update(Text(visible(str(found))), refresh=True)
                else:
                    live.update(Group(*_parts(found, server)), refresh=True)
        except KeyboardInterrupt:
            return


def _parts(vitals: Vitals, server: str) -> Iterator[RenderableType]:
    paused = ", paused" if vitals.is_paused else ""
    yield Text(f"polar {server}   policy version {vitals.policy_version}{paused}", style="bold")
    yield ""
    counts = (vitals.sessions.get(status, 0) for status in SessionStatus)
    yield table(["SESSIONS", *(f">{status.upper()}" for status in SessionStatus)], [["", *counts]])
    yield ""
    yield _rates(vitals)
    if vitals.nodes:
        yield ""
        yield node_table(vitals.nodes)
    if vitals.pools:
        yield ""
        pools = ([pool.name, f"{pool.occupied}/{pool.size}", _bar(pool)] for pool in vitals.pools)
        yield table(["POOL", ">TAKEN", ""], pools)
    if vitals.engines:
        yield ""
        engines = (
            [
                engine.url,
                "up" if engine.is_up else "down",
                engine.running,
                engine.waiting,
                _percent(engine.kv_usage),
                _percent(engine.prefix_hits),
            ]
            for engine in vitals.engines
        )
        yield table(["ENGINE", "STATE", ">RUNNING", ">WAITING", ">KV", ">PREFIX HITS"], engines)


def _rates(vitals: Vitals) -> Table:
    rates = {
        ">SESSIONS/S": f"{vitals.sessions_per_second:.2f}",
        ">MODEL CALLS/S": f"{vitals.completions_per_second:.2f}",
        ">TOKENS/S": f"{vitals.sampled_tokens_per_second:.1f}",
        ">FIRST TOKEN P50": _seconds(vitals.first_token_p50),
        ">P95": _seconds(vitals.first_token_p95),
        ">MEAN REWARD": vitals.mean_reward,
        ">USABLE": _percent(vitals.usable_share),
    }
    return table(list(rates), [list(rates.values())])


def _seconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def _bar(pool: PoolSigns) -> str:
    filled = round(BAR * pool.occupied / pool.size) if pool.size else 0
    return "█" * filled + "░" * (BAR - filled)
