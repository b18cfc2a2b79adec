"""Dates that do not depend on the day they are read."""

import datetime
import re

MONTHS = {
    name: number
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), start=1
    )
}
PIVOT = 69
"""Two-digit years up to this one are of this century, as POSIX has it."""

ISO = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})")
DOTTED = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{2}|\d{4})")
DAY_FIRST = re.compile(r"(\d{1,2})\s+([a-z]{3,9})\.?,?\s+(\d{2}|\d{4})")
MONTH_FIRST = re.compile(r"([a-z]{3,9})\.?\s+(\d{1,2}),?\s+(\d{2}|\d{4})")


def full_year(digits):
    year = int(digits)
    if len(digits) == 4:
        return year
    return 2000 + year


def month_number(name):
    try:
        return MONTHS[name[:3]]
    except KeyError:
        raise ValueError(f"unknown month: {name!r}") from None


def parse_absolute(text):
    text = text.strip().lower()
    if match := ISO.fullmatch(text):
        return datetime.date(*map(int, match.groups()))
    if match := DOTTED.fullmatch(text):
        day, month, year = match.groups()
        return datetime.date(full_year(year), int(month), int(day))
    if match := DAY_FIRST.fullmatch(text):
        day, month, year = match.groups()
        return datetime.date(full_year(year), month_number(month), int(day))
    if match := MONTH_FIRST.fullmatch(text):
        month, day, year = match.groups()
        return datetime.date(full_year(year), month_number(month), int(day))
    raise ValueError(f"not a date: {text!r}")
