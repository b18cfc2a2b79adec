"""An environment that gets more packages still has Polar itself in it, and nothing that nobody asked for."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/environment.py for an environment below a directory of the test's own."""
    spec = importlib.util.spec_from_file_location("environment_tool", ROOT / "tools" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path / "cache"))
    venv = tmp_path / ".venv"
    for name, value in {"VENV": venv, "BIN": venv / "bin", "STAMP": venv / ".environment"}.items():
        monkeypatch.setattr(module, name, value)

    def make_venv(*_options: str) -> None:
        shutil.rmtree(venv, ignore_errors=True)
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").touch()

    monkeypatch.setattr(module, "make_venv", make_venv)
    return module


def test_polar_is_installed_again_when_an_extra_is_added(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_polar = False

    def pip(*arguments: str) -> None:
        nonlocal has_polar
        if arguments[0] == "uninstall":
            has_polar = False
        elif "--editable" in arguments:
            has_polar = True

    monkeypatch.setattr(environment, "pip", pip)
    monkeypatch.setattr(environment, "keep_environment", lambda _cached: None)
    for extras in (["engine", "dev"], ["engine", "dev", "ray"], ["engine", "dev"]):
        environment.make_environment(extras)
        environment.install_polar()
        assert has_polar, extras


def test_an_environment_is_built_upon_its_own_cached_part_alone(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[str] = []

    def pip(*arguments: str) -> None:
        if arguments[0] == "install":
            extras = arguments[-1].partition("[")[2].rstrip("]").split(",")
            for name in extras:
                (environment.site_packages() / name).mkdir(parents=True, exist_ok=True)
            installed.extend(extras)

    monkeypatch.setattr(environment, "pip", pip)
    for extras in (["engine"], ["engine", "train", "ray"], ["engine", "dev"]):
        environment.make_environment(extras)
        assert sorted(path.name for path in environment.site_packages().iterdir()) == sorted(extras)
    installed.clear()
    environment.make_environment(["engine", "train", "ray"])
    assert not installed, "it is in the cache"
