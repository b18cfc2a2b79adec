"""Whether a version satisfies `^1.2.3`, `~1.2.3`, `>=1.2.3` and so on."""

from semver.version import Version

OPERATORS = ("^", "~", ">=", "<=", ">", "<", "=")


def satisfies(version, wanted):
    """Whether the version satisfies every part of a range such as `>=1.2.0 <2.0.0`."""
    version = Version(version) if isinstance(version, str) else version
    return all(_satisfies_part(version, part) for part in wanted.split())


def _satisfies_part(version, part):
    operator = next((name for name in OPERATORS if part.startswith(name)), "=")
    base = Version(part.removeprefix(operator))
    if operator == "^":
        return base <= version and version.release < caret_end(base)
    if operator == "~":
        return base <= version and version.release < (base.major, base.minor + 1, 0)
    if operator == ">=":
        return version >= base
    if operator == "<=":
        return version <= base
    if operator == ">":
        return version > base
    if operator == "<":
        return version < base
    return version == base


def caret_end(base):
    """The first release that may break what works with `base`."""
    if base.major:
        return (base.major + 1, 0, 0)
    if base.minor:
        return (0, base.minor + 1, 0)
    return (0, 0, base.patch + 1)
