"""An allow list means the servers it names, by no other spelling and at no address that is not public."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.config import plugins
from polar.errors import InvalidInput
from polar.models.component import Component
from polar.runtimes.allow_list import AllowList, Destination

LISTED = AllowList.parse(
    ["pypi.org:443", "*.example.org:443", "10.1.2.3:8080", "localhost:9000", "[::1]:7000"]
)


@pytest.mark.parametrize(
    "wanted", ["pypi.org:443", "PyPI.org.:443", "a.example.org:443", "b.a.example.org:443", "10.1.2.3:8080"]
)
def test_listed_servers_may_be_asked_for(wanted: str) -> None:
    assert LISTED.names(Destination.parse(wanted))


@pytest.mark.parametrize(
    "wanted",
    [
        *("pypi.org:80", "files.pypi.org:443", "example.org:443", "notexample.org:443", "evilpypi.org:443"),
        *("example.org.evil.com:443", "10.1.2.3:8081", "10.1.2.4:8080", "localhost:47100", "[::2]:7000"),
    ],
)
def test_others_may_not(wanted: str) -> None:
    assert not LISTED.names(Destination.parse(wanted))


@pytest.mark.parametrize(
    "text",
    [
        *("pypi.org", "pypi.org:0", "pypi.org:65536", "pypi.org:https", ":443", "*:443", "*.*.org:443"),
        *("a.*.org:443", "user@pypi.org:443", "pypi.org/x:443", "2130706433:80", "0x7f000001:80", "127.1:80"),
        *(
            "::1:80",
            "[127.0.0.1]:80",
            "[fe80::1%lo]:80",
            "a..b:443",
            "-a.org:443",
            "py pi.org:443",
            "é.org:1",
        ),
    ],
)
def test_what_is_no_server_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host"):
        Destination.parse(text)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "::1", "::", "fe80::1", "fd00:ec2::254", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
        *("2002:7f00:1::", "ff02::1"),
    ],
)
def test_a_listed_name_is_not_reached_at_an_address_that_is_not_public(address: str) -> None:
    assert not LISTED.admits(Destination.parse("a.example.org:443"), ip_address(address))


def test_a_private_address_is_reached_by_a_name_where_it_is_listed_itself() -> None:
    listed = AllowList.parse(["inner.example.org:8080", "10.1.2.3:8080"])
    wanted = Destination.parse("inner.example.org:8080")
    assert listed.admits(wanted, ip_address("10.1.2.3"))
    assert not listed.admits(wanted, ip_address("10.1.2.4"))


def test_localhost_is_this_machine_and_public_names_are_public() -> None:
    assert LISTED.admits(Destination.parse("localhost:9000"), ip_address("127.0.0.1"))
    assert not LISTED.admits(Destination.parse("localhost:9000"), ip_address("10.0.0.1"))
    assert LISTED.admits(Destination.parse("pypi.org:443"), ip_address("151.101.0.223"))


HOSTS = st.sampled_from(["a.org", "b.a.org", "c.b.a.org", "*.a.org", "*.b.a.org", "org.a", "127.0.0.1"])
LISTS = st.lists(st.builds(Destination, HOSTS, st.sampled_from([80, 443]))).map(
    lambda given: AllowList(tuple(given))
)


@given(LISTS, LISTS, st.builds(Destination, HOSTS, st.sampled_from([80, 443])))
def test_a_list_within_another_names_nothing_more(
    asked: AllowList, node: AllowList, one: Destination
) -> None:
    if not asked.beyond(node) and asked.names(one):
        assert node.names(one)


def test_a_plain_process_cannot_be_kept_to_a_list() -> None:
    component = Component(name="process", options={"network": {"allow": ["pypi.org:443"]}})
    with pytest.raises(InvalidInput, match=r"runtime\.options.*plain processes cannot"):
        plugins.create("runtimes", "runtime", component)


def test_a_wrong_entry_is_named() -> None:
    component = Component(name="bubblewrap", options={"network": {"allow": ["pypi.org:443", "pypi.org"]}})
    with pytest.raises(InvalidInput, match=r"runtime\.options\.network\.allow\.1: .*must be host:port"):
        plugins.create("runtimes", "runtime", component)
