"""A page of metrics opens to its own machine, and to others with the token."""

from __future__ import annotations

from collections.abc import Iterable

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Metric

from polar.config.settings import TelemetrySettings
from polar.errors import PolarError, Unavailable
from polar.telemetry.page import MetricSource, MetricsPage, bears, is_local, listening

TOKEN = "a-token-for-readers"


def counted(name: str, count: int = 1) -> MetricSource:
    registry = CollectorRegistry()
    Counter(name, "Things.", registry=registry).inc(count)

    async def families() -> Iterable[Metric]:
        return registry.collect()

    return families


def page_of_one() -> MetricsPage:
    page = MetricsPage()
    page.add(counted("polar_test_things", 3))
    return page


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_a_machine_reads_its_own(address: str) -> None:
    assert is_local(address, {})


@pytest.mark.parametrize("address", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "localhost", "", None])
def test_others_are_not_taken_for_it(address: str | None) -> None:
    assert not is_local(address, {})


@pytest.mark.parametrize("header", ["forwarded", "x-forwarded-for", "x-real-ip"])
def test_a_proxy_here_speaks_for_somebody_else(header: str) -> None:
    assert not is_local("127.0.0.1", {header: "127.0.0.1"})


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8700", "[::1]:8700", "localhost", "LOCALHOST:1", "a.localhost:9", "10.1.2.3"]
)
def test_addresses_and_localhost_name_this_machine(host: str) -> None:
    assert is_local("127.0.0.1", {"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8700",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "",
        "[",
        "a@127.0.0.1.evil",
    ],
)
def test_a_page_with_a_name_of_its_own_is_not_this_machine(host: str) -> None:
    assert not is_local("127.0.0.1", {"host": host})


def test_only_the_token_itself_opens() -> None:
    assert bears(f"Bearer {TOKEN}", TOKEN)
    assert bears(f"bearer  {TOKEN} ", TOKEN)
    for given in (None, "", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN):
        assert not bears(given, TOKEN)
        assert not bears(given, None)


async def test_a_node_shows_its_page_here_and_with_the_token_elsewhere() -> None:
    settings = TelemetrySettings(metrics_port=0, metrics_token=TOKEN)
    async with listening(settings, page_of_one()) as address, httpx.AsyncClient() as http:
        assert address is not None
        local = await http.get(address)
        assert "polar_test_things_total 3.0" in local.text
        assert "process_cpu_seconds_total" in local.text
        assert "_created" not in local.text
        proxied = {"X-Forwarded-For": "10.0.0.9"}
        refused = await http.get(address, headers=proxied)
        assert (refused.status_code, "polar_test" in refused.text) == (401, False)
        shown = await http.get(address, headers={**proxied, "Authorization": f"Bearer {TOKEN}"})
        assert shown.status_code == 200
        assert (await http.get(address.replace("/metrics", "/"))).status_code == 404


async def test_a_node_without_a_port_shows_nothing() -> None:
    async with listening(TelemetrySettings(), page_of_one()) as address:
        assert address is None


async def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    async with listening(TelemetrySettings(metrics_port=0), page_of_one()) as address:
        port = int(str(address).rpartition(":")[2].partition("/")[0])
        with pytest.raises(PolarError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            async with listening(TelemetrySettings(metrics_port=port), page_of_one()):
                raise AssertionError


async def test_a_part_that_cannot_be_asked_is_left_out() -> None:
    async def broken() -> list[Metric]:
        raise Unavailable("the database is away")

    page = page_of_one()
    with page.showing(broken):
        assert b"polar_test_things_total 3.0" in await page.text()


async def test_a_part_is_shown_while_it_runs() -> None:
    page = MetricsPage()
    with page.showing(counted("polar_test_more")):
        assert b"polar_test_more_total 1.0" in await page.text()
    assert b"polar_test_more" not in await page.text()
