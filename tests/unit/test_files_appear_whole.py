"""Files and directories that are shared appear whole or not at all, and a lock has one holder."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.errors import Conflict
from polar.files import atomic_directory, atomic_file, locked, write_atomic


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    taken = Conflict("taken")
    with (
        locked(tmp_path / "lock", busy=taken),
        pytest.raises(Conflict, match="taken"),
        locked(tmp_path / "lock", busy=taken),
    ):
        pass
    with locked(tmp_path / "lock", busy=Conflict("taken")):
        pass


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_file(path, mode=0o640, durable=durable) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError), atomic_file(path) as part:
        part.write_text("half \udc80")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [False, True])
def test_a_directory_appears_whole_and_leftovers_go(tmp_path: Path, durable: bool) -> None:
    (tmp_path / ".made.part-dead").mkdir()
    with atomic_directory(tmp_path / "made", durable=durable) as part:
        (part / "inside").write_text("x")
        assert not (tmp_path / "made").exists()
    assert (tmp_path / "made" / "inside").read_text() == "x"
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_a_failed_directory_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_directory(tmp_path / "made"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
