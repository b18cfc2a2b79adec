"""A pause of the sync client holds as long as its block runs, and ends with it."""

from __future__ import annotations

import pytest

from polar.client import Client
from polar.errors import Conflict
from tests.unit.client.conftest import Plane


def test_a_block_holds_its_pause_and_ends_it(plane: Plane) -> None:
    with Client(plane.url, plane.token) as client:
        with client.paused(timeout_seconds=1) as pause:
            before, after = client.policy(), client.policy()
            while (after.seconds_left or 0) <= (before.seconds_left or 0):
                assert after.holder == pause.holder, "it is renewed before it ends"
                before, after = after, client.policy()
            assert pause.update("/weights/1").version == 1
            with pytest.raises(Conflict), client.paused():
                pass
            assert client.policy().holder == pause.holder
        assert not client.policy().is_paused


def test_a_relative_path_is_made_absolute(plane: Plane) -> None:
    """The engine's working directory is another one."""
    with Client(plane.url, plane.token) as client:
        assert str(client.update_policy("weights").path).startswith("/")
