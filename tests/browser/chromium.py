"""The browser of the tests: the system's Chromium, or else one from npm that needs no root and no package."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path

from playwright.sync_api import Browser, Playwright

from polar.assets.cache import asset
from polar.assets.node import node, unpack_npm

PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"
INTEGRITY = "sha512-jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
INFLATE = "process.stdin.pipe(require('zlib').createBrotliDecompress()).pipe(process.stdout)"
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>/usr/share/fonts</dir><dir prefix="relative">fonts</dir></fontconfig>
"""


def is_there() -> bool:
    """Whether this machine has a browser, or npm has one for it."""
    return _installed() is not None or (platform.system(), platform.machine()) == ("Linux", "x86_64")


def launch(playwright: Playwright) -> Browser:
    """The system's browser; where there is none, npm's with the libraries and the font that it comes with."""
    arguments = ["--no-sandbox"]
    if installed := _installed():
        return playwright.chromium.launch(executable_path=installed, args=arguments)
    root = asset(f"chromium-{VERSION}", _make)
    needed = {"LD_LIBRARY_PATH": str(root / "lib"), "FONTCONFIG_FILE": str(root / "fonts.conf")}
    environment: dict[str, str | float | bool] = {**os.environ, **needed}
    return playwright.chromium.launch(executable_path=root / "chromium", args=arguments, env=environment)


def _installed() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


def _make(into: Path) -> None:
    package = into / "package"
    unpack_npm(PACKAGE, VERSION, INTEGRITY, package)
    _inflate(package / "bin" / "chromium.br", into / "chromium")
    (into / "chromium").chmod(0o755)
    for name in ("al2023.tar", "fonts.tar", "swiftshader.tar"):
        _inflate(package / "bin" / f"{name}.br", into / name)
        with tarfile.open(into / name) as archive:
            archive.extractall(into, filter="data")
        (into / name).unlink()
    (into / "fonts.conf").write_text(FONTS)
    shutil.rmtree(package)


def _inflate(source: Path, target: Path) -> None:
    with source.open("rb") as given, target.open("wb") as taken:
        subprocess.run([node() / "bin" / "node", "-e", INFLATE], stdin=given, stdout=taken, check=True)
