"""The normal form of a URL."""

import re
from urllib.parse import urlsplit, urlunsplit

from urlnorm.paths import remove_dot_segments

DEFAULT_PORTS = {"http": 80, "https": 443, "ftp": 21}
ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def normalise(url):
    """The URL with its scheme and host in lower case, without what it would mean anyway."""
    parts = urlsplit(url.strip())
    scheme = parts.scheme.lower()
    path = remove_dot_segments(fix_escapes(parts.path)) or "/"
    return urlunsplit((scheme, authority(parts, scheme), path, fix_escapes(parts.query), parts.fragment))


def authority(parts, scheme):
    host = (parts.hostname or "").lower()
    if ":" in host:
        host = f"[{host}]"
    user, at, _ = parts.netloc.rpartition("@")
    port = "" if parts.port in (None, DEFAULT_PORTS.get(scheme)) else f":{parts.port}"
    return f"{user}{at}{host}{port}"


def fix_escapes(text):
    """Escapes of characters that need none are undone, all others written in capitals."""

    def fix(match):
        char = chr(int(match[1], 16))
        return char if char in UNRESERVED else match[0]

    return ESCAPE.sub(fix, text)
