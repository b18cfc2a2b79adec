"""Programs that npm carries as one native package a platform: only this machine's is fetched."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polar.assets.cache import asset
from polar.assets.npm import unpack_npm
from polar.errors import NotInstalled


@dataclass(frozen=True, slots=True)
class Build:
    """The npm package that holds a program for one platform."""

    package: str
    version: str
    integrity: str
    """`sha512-…` of its tarball."""


def native(name: str, version: str, builds: Mapping[str, Build]) -> Path:
    """The unpacked package of this machine's build; `builds` goes by `system-machine`, as in linux-x86_64."""
    here = f"{platform.system()}-{platform.machine()}".lower()
    build = builds.get(here)
    if build is None:
        raise NotInstalled(
            f"{name} {version} has no pinned build for {here}",
            hint=f"run the node on one of: {', '.join(sorted(builds))}",
        )
    return asset(
        f"{name}-{version}-{here}",
        lambda into: unpack_npm(build.package, build.version, build.integrity, into),
    )
