"""Dates as people write them."""

from dateline.absolute import parse_absolute
from dateline.relative import parse_relative


def parse(text, today):
    """The date that `text` means on the day `today`; ValueError if it means none."""
    parsed = parse_relative(text, today)
    return parsed if parsed is not None else parse_absolute(text)


__all__ = ["parse", "parse_absolute", "parse_relative"]
