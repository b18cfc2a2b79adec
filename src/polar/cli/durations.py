"""Lengths of time as people write them on a command line."""

from __future__ import annotations

import re

from polar.errors import InvalidInput

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def seconds(text: str, option: str) -> float:
    """`90s`, `15m`, `12h`, `30d`; a bare number is seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip())
    if match is None:
        raise InvalidInput(f"{option}: {text!r} is no length of time", hint="90s, 15m, 12h or 30d")
    return float(match[1]) * _UNITS[match[2] or "s"]
