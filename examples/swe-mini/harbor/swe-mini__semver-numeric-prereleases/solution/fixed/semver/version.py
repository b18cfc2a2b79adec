"""One version number."""

import functools
import re

PATTERN = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:-([0-9A-Za-z.-]+))?(?:\+([0-9A-Za-z.-]+))?")


def _rank(identifier):
    """Numbers come before names, and in their own order."""
    return (0, int(identifier), "") if identifier.isdigit() else (1, 0, identifier)


@functools.total_ordering
class Version:
    """`major.minor.patch-prerelease+build`; the build says nothing about the order."""

    def __init__(self, text):
        match = PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not a version: {text!r}")
        self.major, self.minor, self.patch = (int(number) for number in match.groups()[:3])
        self.prerelease = tuple(match[4].split(".")) if match[4] else ()
        self.build = match[5]

    def __repr__(self):
        return f"Version({str(self)!r})"

    def __str__(self):
        text = f"{self.major}.{self.minor}.{self.patch}"
        return f"{text}-{'.'.join(self.prerelease)}" if self.prerelease else text

    @property
    def release(self):
        return (self.major, self.minor, self.patch)

    def _key(self):
        # A version is newer than its prereleases.
        return (self.release, not self.prerelease, tuple(map(_rank, self.prerelease)))

    def __eq__(self, other):
        return self._key() == other._key()

    def __lt__(self, other):
        return self._key() < other._key()

    def __hash__(self):
        return hash(self._key())
