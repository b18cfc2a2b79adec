"""Writes the lock files of harnesses and of tests: every package they consist of, with its files' hashes.

    .venv/bin/python -m tools.locks [PRESET...]

Run it after changing the version of a harness, or of a test runner in `suites/attacks/runners`, then run its
tests. URLs are left out: npm and pip use the registries they are configured for, and the hashes verify what
they download.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import parse_wheel_filename

from polar.assets.node import NPM_CLI, node
from polar.harnesses import gemini_cli, qwen_code
from polar.harnesses.preset import Preset, names, preset
from tools.isolated import install_isolated
from tools.resolution import UV

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "src" / "polar" / "harnesses" / "locks"
NPM = {"gemini_cli.json": gemini_cli, "qwen_code.json": qwen_code}
RUNNERS = ROOT / "suites" / "attacks" / "runners"
PYTHON = (LOCKS / "mini_swe_agent.in", ROOT / "tests" / "fakes" / "moto_server.in")
EXCLUDED = "datasets\n"
PYTHONS = tuple(f"cp3{minor}" for minor in range(11, 15))
SYSTEMS = ("linux", "darwin")
PLATFORMS = ("any", "manylinux", "macosx")
MACHINES = ("any", "x86_64", "aarch64", "arm64", "universal2")


def main() -> None:
    if not sys.argv[1:]:
        lock_the_rest()
    for name in sys.argv[1:] or names():
        known = preset(name)
        if known.builds:
            (LOCKS / f"{name}.json").write_text(builds_lock(known))
        else:
            (LOCKS / f"{name}.txt").write_text(python_lock(f"{known.package}=={known.version}"))


def lock_the_rest() -> None:
    for name, harness in NPM.items():
        (LOCKS / name).write_text(npm_lock({"dependencies": {harness.PACKAGE: harness.VERSION}}))
    (RUNNERS / "package-lock.json").write_text(npm_lock(json.loads((RUNNERS / "package.json").read_text())))
    for wanted in PYTHON:
        wanted.with_suffix(".txt").write_text(python_lock(wanted.read_text()))


def builds_lock(known: Preset) -> str:
    """Return the packages of a preset's builds as `polar.assets.node.native` reads them."""
    locked = {
        machine: {"package": one, "version": known.version, "integrity": integrity(one, known.version)}
        for machine, one in known.builds.items()
    }
    return json.dumps(locked, indent=2) + "\n"


def integrity(package: str, version: str) -> str:
    root = node()
    npm = [str(root / "bin" / "node"), str(root / NPM_CLI), "view", f"{package}@{version}", "dist.integrity"]
    return subprocess.run(npm, check=True, capture_output=True, text=True).stdout.strip()


def npm_lock(wanted: dict[str, Any]) -> str:
    """`wanted` as in a package.json."""
    root = node()
    npm = [str(root / "bin" / "node"), str(root / NPM_CLI), "install", "--package-lock-only"]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "package.json").write_text(json.dumps(wanted))
        subprocess.run([*npm, "--ignore-scripts", "--no-audit", "--no-fund"], cwd=directory, check=True)
        lock: dict[str, Any] = json.loads(Path(directory, "package-lock.json").read_text())
    lock["name"] = "harness"
    for entry in lock["packages"].values():
        for address in ("resolved", "funding"):
            entry.pop(address, None)
        drop_unlocked(entry.get("optionalDependencies", {}), lock["packages"])
    return json.dumps(lock, indent=2) + "\n"


def drop_unlocked(optional: dict[str, str], locked: dict[str, Any]) -> None:
    """Remove optional packages that the registry lacks, which `npm ci` would ask for."""
    names = {path.rpartition("node_modules/")[2] for path in locked}
    for name in optional.keys() - names:
        del optional[name]


def python_lock(wanted: str) -> str:
    """`wanted` as in a requirements file."""
    with tempfile.TemporaryDirectory() as directory:
        asked, excluded, locked = (Path(directory, name) for name in ("wanted.in", "excluded", "pylock.toml"))
        asked.write_text(wanted)
        excluded.write_text(EXCLUDED)
        uv = [str(install_isolated(UV) / "uv"), "pip", "compile", "--quiet", "--universal", "--system-certs"]
        uv += ["--python-version=3.11", "--format=pylock.toml", f"--excludes={excluded}", f"-o={locked}"]
        subprocess.run([*uv, str(asked)], check=True)
        packages = tomllib.loads(locked.read_text())["packages"]
    return "".join(requirement(package) for package in packages if is_needed(package))


def is_needed(package: dict[str, Any]) -> bool:
    """Whether any machine that runs nodes installs it."""
    marker = Marker(package.get("marker", "python_version >= '3'"))
    return any(marker.evaluate({"sys_platform": system}) for system in SYSTEMS)


def requirement(package: dict[str, Any]) -> str:
    marker = f" ; {package['marker']}" if "marker" in package else ""
    hashes = [f"    --hash=sha256:{digest}" for digest in sorted(digests(package))]
    if not hashes:
        raise SystemExit(f"error: {package['name']} {package['version']} has no wheel for these machines")
    lines = [f"{package['name']}=={package['version']}{marker}", *hashes]
    return " \\\n".join(lines) + "\n"


def digests(package: dict[str, Any]) -> Iterator[str]:
    """Yield the hashes of wheels for machines that run nodes; all of them would be five times as many."""
    for wheel in package.get("wheels", ()):
        name = wheel.get("name") or wheel["url"].rpartition("/")[2]
        if is_for_nodes(name):
            yield wheel["hashes"]["sha256"]


def is_for_nodes(wheel: str) -> bool:
    return any(
        (tag.interpreter.startswith("py") or tag.abi == "abi3" or tag.interpreter in PYTHONS)
        and not tag.abi.endswith("t")
        and tag.platform.startswith(PLATFORMS)
        and tag.platform.endswith(MACHINES)
        for tag in parse_wheel_filename(wheel)[3]
    )


if __name__ == "__main__":
    main()
