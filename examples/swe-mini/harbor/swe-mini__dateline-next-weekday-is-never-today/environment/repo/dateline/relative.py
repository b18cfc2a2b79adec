"""Dates that are counted from the day they are read."""

import datetime
import re

WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
FIXED = {"yesterday": -1, "today": 0, "tomorrow": 1}
AGO = re.compile(r"(\d+) (day|week)s? ago")
AHEAD = re.compile(r"in (\d+) (day|week)s?")
WEEKDAY = re.compile(rf"(next|last) ({'|'.join(WEEKDAYS)})")
DAYS = {"day": 1, "week": 7}


def parse_relative(text, today):
    """The date, or None if the text names no relative one."""
    text = " ".join(text.lower().split())
    if text in FIXED:
        return today + datetime.timedelta(days=FIXED[text])
    if match := AGO.fullmatch(text):
        return today - datetime.timedelta(days=int(match[1]) * DAYS[match[2]])
    if match := AHEAD.fullmatch(text):
        return today + datetime.timedelta(days=int(match[1]) * DAYS[match[2]])
    if match := WEEKDAY.fullmatch(text):
        return to_weekday(today, WEEKDAYS.index(match[2]), forward=match[1] == "next")
    return None


def to_weekday(today, weekday, forward):
    """The nearest such weekday after or before today; never today itself."""
    distance = (weekday - today.weekday()) % 7
    if not forward:
        distance = distance - 7
    return today + datetime.timedelta(days=distance)
