"""`polar top`: what the system does, live in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import AsJson, Server, Token, connect
from polar.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from polar.app.vitals import EngineSigns, NodeSigns, PoolSigns, Vitals
    from polar.client import Client

HELD = ("init", "ready", "running", "postrun")
BAR = 20


def top(
    interval: Annotated[
        float, typer.Option(min=0.2, max=60.0, help="Seconds from one look to the next.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print, and end.")] = False,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Show nodes, pools, throughput, rewards, the policy and the engines, until Ctrl-C.

    A token that may only read will do. Pools, tokens per second and engines are those of the server's own
    process; nodes that run apart show theirs at their own `/metrics`.

    Example: polar top --once --json
    """
    with connect(server, token) as client:
        looks = _looks(client, interval)
        if once or as_json:
            _print(next(looks), client.server, as_json=as_json)
            while not once:
                _print(next(looks), client.server, as_json=as_json)
            return
        _watch(looks, client.server)


def _looks(client: Client, interval: float) -> Iterator[Vitals | Unavailable]:
    """What every look finds, or that the server could not be looked at; the first look must succeed."""
    from polar.app.vitals import Look, Vitals

    before = Look.at_server(client)
    while True:
        time.sleep(interval)
        try:
            now = Look.at_server(client)
        except Unavailable as error:
            yield error
        else:
            yield Vitals.between(before, now)
            before = now


def _print(vitals: Vitals | Unavailable, server: str, *, as_json: bool) -> None:
    from polar.cli.output import print_json_line, print_parts

    if isinstance(vitals, Unavailable):
        raise vitals
    if as_json:
        print_json_line(vitals)
    else:
        print_parts(*_parts(vitals, server))


def _watch(looks: Iterator[Vitals | Unavailable], server: str) -> None:
    """Until Ctrl-C, also while the server is away: it may be restarted."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from polar.cli.output import console, visible

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
    from rich.text import Text

    paused = ", paused" if vitals.is_paused else ""
    yield Text(f"polar {server}   policy version {vitals.policy_version}{paused}", style="bold")
    yield ""
    yield _sessions(vitals)
    yield ""
    yield _rates(vitals)
    if vitals.nodes:
        yield ""
        yield _nodes(vitals.nodes)
    if vitals.pools:
        yield ""
        yield _pools(vitals.pools)
    if vitals.engines:
        yield ""
        yield _engines(vitals.engines)


def _sessions(vitals: Vitals) -> Table:
    from polar.cli.output import table
    from polar.models.session import SessionStatus

    names = [status.value for status in SessionStatus]
    counts = [vitals.sessions.get(status, 0) for status in SessionStatus]
    return table(["sessions", *names], [["", *counts]], numbers=names)


def _rates(vitals: Vitals) -> Table:
    from polar.cli.output import table

    share = None if vitals.usable_share is None else f"{vitals.usable_share:.0%}"
    columns = {
        "sessions/s": f"{vitals.sessions_per_second:.2f}",
        "model calls/s": f"{vitals.completions_per_second:.2f}",
        "tokens/s": f"{vitals.sampled_tokens_per_second:.1f}",
        "first token p50": _seconds(vitals.first_token_p50),
        "p95": _seconds(vitals.first_token_p95),
        "mean reward": vitals.mean_reward,
        "usable": share,
    }
    return table(list(columns), [list(columns.values())], numbers=list(columns))


def _seconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _nodes(nodes: Sequence[NodeSigns]) -> Table:
    from polar.cli.output import table

    rows = (
        [
            node.name,
            _state(node),
            node.policy_version,
            *(node.sessions.get(stage, 0) for stage in HELD),  # type: ignore[call-overload]
            node.trouble or node.error or "",
        ]
        for node in nodes
    )
    return table(["node", "state", "policy", *HELD, "error"], rows, numbers=["policy", *HELD])


def _state(node: NodeSigns) -> str:
    if not node.is_alive:
        return "silent"
    if node.is_draining:
        return "draining"
    return "troubled" if node.trouble else "up"


def _pools(pools: Sequence[PoolSigns]) -> Table:
    from polar.cli.output import table

    rows = ([pool.name, f"{pool.occupied}/{pool.size}", _bar(pool)] for pool in pools)
    return table(["pool", "taken", ""], rows, numbers=["taken"])


def _bar(pool: PoolSigns) -> str:
    filled = round(BAR * pool.occupied / pool.size) if pool.size else 0
    return "█" * filled + "░" * (BAR - filled)


def _engines(engines: Sequence[EngineSigns]) -> Table:
    from polar.cli.output import table

    rows = (
        [
            engine.url,
            "up" if engine.is_up else "down",
            engine.running,
            engine.waiting,
            None if engine.kv_usage is None else f"{engine.kv_usage:.0%}",
            None if engine.prefix_hits is None else f"{engine.prefix_hits:.0%}",
        ]
        for engine in engines
    )
    columns = ["engine", "state", "running", "waiting", "KV", "prefix hits"]
    return table(columns, rows, numbers=columns[2:])
