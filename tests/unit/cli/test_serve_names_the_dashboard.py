"""`polar serve` names the dashboard's address, and its token only to a person at a terminal."""

from __future__ import annotations

import sys

import pytest

from polar.cli.serve import _say_dashboard

ADDRESS = "http://127.0.0.1:8700/#token=polar_1_secret"


@pytest.mark.parametrize(("is_terminal", "said"), [(True, ADDRESS), (False, "http://127.0.0.1:8700/")])
def test_token_is_shown_to_a_terminal_only(
    is_terminal: bool, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    _say_dashboard(ADDRESS)
    assert capsys.readouterr().out == f"dashboard: {said}\n"
