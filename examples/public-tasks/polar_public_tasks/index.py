"""Files of the package index, pinned by hash and cached: wheels, and sdists with their tests."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tarfile
import urllib.request
from base64 import b64encode
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import unquote_to_bytes, urljoin, urlsplit, urlunsplit

from polar.assets.cache import DownloadFailed, asset, run_tool
from polar.assets.pypi import Wheel, unpack_wheel

PYPI = "https://pypi.org/simple"
_SETTING = re.compile(r"^(:env:|download|install|global)\.index-url='(.+)'$", re.MULTILINE)
_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Sdist:
    """A source distribution, which unlike most wheels includes the package's tests."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def wheel_directory(wheel: Wheel) -> Path:
    return asset(wheel.requirement.replace("==", "-"), lambda into: unpack_wheel(wheel, into))


def sdist_directory(sdist: Sdist) -> Path:
    """Return the unpacked sdist, without its top directory.

    pip is not used: even downloading an sdist, it runs the package's own code.
    """
    return asset(f"sdist-{sdist.name}-{sdist.version}", lambda into: _unpack(sdist, into))


def _unpack(sdist: Sdist, into: Path) -> None:
    index, password = _without_password(_index())
    page = f"{index}/{sdist.name}/"
    ending = f"-{sdist.version}.tar.gz"
    try:
        links = re.findall(r'href="([^"#]+)', _fetch(page, password).decode())
        place = urljoin(page, next(link for link in links if link.endswith(ending)))
        # Files may be on another host, which must not see the password.
        is_same_host = urlsplit(place)[:2] == urlsplit(page)[:2]
        data = _fetch(place, password if is_same_host else None)
    except (OSError, HTTPException, StopIteration) as error:
        reason = "no such file" if isinstance(error, StopIteration) else str(error)
        raise DownloadFailed(
            f"could not download the sdist of {sdist} from {page}: {reason}",
            hint="check the network and pip's index-url setting, or copy a Polar cache that has it",
        ) from None
    if hashlib.sha256(data).hexdigest() != sdist.sha256:
        raise DownloadFailed(f"{sdist}: the hash of the sdist at {page} differs from the pinned one")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            _, _, member.name = member.name.partition("/")
            if member.isreg() and member.name:
                archive.extract(member, into, filter="data")


def _index() -> str:
    """Return the index that pip is configured for."""
    said = run_tool([sys.executable, "-m", "pip", "config", "list"]).stdout
    found = dict(_SETTING.findall(said))
    return next(
        (found[place].rstrip("/") for place in (":env:", "download", "install", "global") if place in found),
        PYPI,
    )


def _without_password(url: str) -> tuple[str, str | None]:
    """Return the URL without `user:password@`, and those as a header."""
    parts = urlsplit(url)
    given, _, host = parts.netloc.rpartition("@")
    shown = urlunsplit(parts._replace(netloc=host))
    return shown, f"Basic {b64encode(unquote_to_bytes(given)).decode()}" if given else None


def _fetch(url: str, password: str | None) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "text/html, */*"})
    if password is not None:
        # Not sent to a redirect's target.
        request.add_unredirected_header("Authorization", password)
    with urllib.request.urlopen(request, timeout=_SECONDS) as response:
        data: bytes = response.read()
    return data
