"""The servers that a sandbox may reach besides the gateway: names, ports and permitted addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

LOCALHOST = "localhost"
"""The one name that stands for this machine."""

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*[a-z]([a-z0-9-]{{0,61}}[a-z0-9])?")
"""Its last label begins with a letter, since resolvers read `127.1` and `0x7f000001` as addresses."""
_TRANSLATED = IPv6Network("64:ff9b::/96")
"""The prefix under which NAT64 networks show all of IPv4."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A server by host and port; a host of `*.domain` covers all names below the domain."""

    host: str
    """A lower-case name, optionally after `*.`, or an address as `ipaddress` writes it."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Destination:
        """Parse `host:port`, `*.domain:port`, `address:port` or `[address]:port`, or raise ValueError."""
        host, separator, port = text.rpartition(":")
        if not separator or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} must be host:port, such as pypi.org:443 or *.example.org:443")
        if address := _address(host):
            return cls(str(address), int(port))
        name = host.lower().removesuffix(".")
        if not _NAME.fullmatch(name.removeprefix("*.")):
            raise ValueError(f"{text!r}: the host must be a name, *. and a name, or an address")
        return cls(name, int(port))

    @property
    def address(self) -> Address | None:
        return _address(f"[{self.host}]" if ":" in self.host else self.host)

    def covers(self, other: Destination) -> bool:
        """Whether this destination includes everything that `other` does."""
        if self.port != other.port:
            return False
        below = self.host.startswith("*.") and other.host.endswith(self.host[1:]) and other.address is None
        return below or self.host == other.host

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class AllowList:
    """The only destinations that may be reached."""

    destinations: tuple[Destination, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> AllowList:
        return cls(tuple(map(Destination.parse, texts)))

    def __bool__(self) -> bool:
        return bool(self.destinations)

    def names(self, wanted: Destination) -> bool:
        """Whether a server is listed by name."""
        return any(listed.covers(wanted) for listed in self.destinations)

    def admits(self, wanted: Destination, address: Address) -> bool:
        """Whether a listed server may be reached at the address that its name resolves to.

        Whoever controls a listed domain can point it at any address. So a private address must itself be
        listed, except for that of `localhost`.
        """
        plain = _plain(address)
        if wanted.host == LOCALHOST and plain.is_loopback:
            return True
        if plain.is_global and not plain.is_multicast:
            return True
        return self.names(Destination(str(address), wanted.port)) or self.names(
            Destination(str(plain), wanted.port)
        )

    def beyond(self, other: AllowList) -> tuple[Destination, ...]:
        """Return the destinations that are listed here but not there."""
        return tuple(wanted for wanted in self.destinations if not other.names(wanted))


def _address(host: str) -> Address | None:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ip_address(bare)
    except ValueError:
        return None
    is_bracketed = bare != host
    if is_bracketed != isinstance(address, IPv6Address) or "%" in bare:
        return None
    return address


def _plain(address: Address) -> Address:
    if isinstance(address, IPv4Address):
        return address
    if address in _TRANSLATED:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None) or address
