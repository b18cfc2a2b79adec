"""What a lease without a result left on a node goes when it is old, and nothing else does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from polar.config.settings import NodeSettings
from polar.node.services import NodeServices, remove_expired
from polar.runtimes.base import Host

HOUR = 3600.0


@pytest.fixture
def services(tmp_path: Path) -> NodeServices:
    places = {f"{kind}_dir": tmp_path / kind for kind in ("captures", "kept")}
    settings = NodeSettings(keep_orphans_hours=2)
    return cast(NodeServices, SimpleNamespace(settings=settings, host=Host(tmp_path), **places))


def left(path: Path, *, hours_ago: float, inside: str | None = None) -> Path:
    """Something that was changed last so long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if inside is None:
        path.write_text("left")
    else:
        (path / inside).mkdir(parents=True)
        (path / inside / "file").write_text("left")
    then = time.time() - hours_ago * HOUR
    os.utime(path, (then, then))
    return path


def test_each_kind_goes_after_its_time(services: NodeServices) -> None:
    old = [
        left(services.captures_dir / "a.0@1.log", hours_ago=3),
        left(services.kept_dir / "a.0@1", hours_ago=3, inside="report"),
        left(services.host.logs / "a.0@1", hours_ago=3, inside="agent"),
        left(services.host.logs / "a.0@1.2", hours_ago=3, inside="agent"),
    ]
    recent = left(services.captures_dir / "b.0@1.log", hours_ago=1)
    assert remove_expired(services, ()) == len(old)
    assert not any(path.exists() for path in old)
    assert recent.exists()
    assert remove_expired(services, ()) == 0


def test_a_lease_at_work_keeps_what_is_its_own_however_old(services: NodeServices) -> None:
    own = [
        left(services.captures_dir / "a.0@2.log", hours_ago=200),
        left(services.host.logs / "a.0@2", hours_ago=200, inside="agent"),
        left(services.host.logs / "a.0@2.2", hours_ago=200, inside="agent"),
    ]
    before = left(services.captures_dir / "a.0@1.log", hours_ago=200)
    assert remove_expired(services, {"a.0@2"}) == 1
    assert all(path.exists() for path in own)
    assert not before.exists()


def test_a_sandbox_that_was_not_closed_is_left_to_its_runtime(services: NodeServices) -> None:
    sandbox = left(services.host.sandboxes / "a.0@1", hours_ago=200, inside="pids")
    assert remove_expired(services, ()) == 0
    assert sandbox.exists()


def test_what_cannot_be_removed_is_told_and_keeps_nothing_else(
    services: NodeServices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = left(services.captures_dir / "a.0@1.log", hours_ago=3)
    other = left(services.captures_dir / "b.0@1.log", hours_ago=3)
    unlink = Path.unlink

    def refuse(path: Path) -> None:
        if path == stuck:
            raise PermissionError(13, "Permission denied")
        unlink(path)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert remove_expired(services, ()) == 1
    assert not other.exists()
    assert "could not be removed: Permission denied" in caplog.text


def test_a_node_without_a_past_has_nothing_to_let_go(services: NodeServices) -> None:
    assert remove_expired(services, ()) == 0
