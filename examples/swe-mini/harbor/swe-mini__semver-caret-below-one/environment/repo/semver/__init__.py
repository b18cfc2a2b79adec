"""Semantic versions and ranges of them."""

from semver.ranges import satisfies
from semver.version import Version

__all__ = ["Version", "satisfies"]
