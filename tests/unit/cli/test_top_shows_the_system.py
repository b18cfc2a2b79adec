"""`polar top` draws the vital signs for people, whatever names and errors hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polar.app.vitals import EngineSigns, PoolSigns, Snapshot, Vitals
from polar.cli.top import top
from polar.models.dashboard import NodeOverview
from polar.models.session import SessionStatus

Show = Callable[[Vitals], list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    def show(vitals: Vitals) -> list[str]:
        monkeypatch.setattr(Snapshot, "of_server", lambda _client: None)
        monkeypatch.setattr(Vitals, "between", lambda _before, _now: vitals)
        top(interval=0.0, once=True, server="http://here", token="unused")
        return capsys.readouterr().out.splitlines()

    return show


QUIET = Vitals(
    sessions={},
    policy_version=0,
    is_paused=False,
    sessions_per_second=0.0,
    sampled_tokens_per_second=0.0,
    completions_per_second=0.0,
    first_token_p50=None,
    first_token_p95=None,
    mean_reward=None,
    usable_share=None,
    nodes=(),
    pools=(),
    engines=(),
)


def test_a_system_at_rest_is_shown_without_empty_tables(shown: Show) -> None:
    lines = shown(QUIET)
    assert lines[0] == "polar http://here   policy version 0"
    assert not any(line.startswith(("NODE", "POOL", "ENGINE")) for line in lines)


def test_everything_has_its_line(shown: Show) -> None:
    busy = QUIET.model_copy(
        update={
            "sessions": {SessionStatus.RUNNING: 3},
            "policy_version": 7,
            "is_paused": True,
            "sampled_tokens_per_second": 412.94,
            "first_token_p50": 0.086,
            "first_token_p95": 1.24,
            "mean_reward": 0.4312,
            "usable_share": 0.94,
            "nodes": (
                NodeOverview(
                    name="gpu-1\x1b[2J",
                    is_silent=True,
                    version=6,
                    seconds_silent=90,
                    sessions={SessionStatus.RUNNING: 3},
                    error="no weights",
                ),
            ),
            "pools": (PoolSigns(name="run", occupied=3, size=4), PoolSigns(name="ready", occupied=0, size=0)),
            "engines": (
                EngineSigns(url="http://a", is_up=True, running=2, kv_usage=0.5, prefix_hits=0.25),
                EngineSigns(url="http://b", is_up=False),
            ),
        }
    )
    lines = shown(busy)
    assert lines[0].endswith("policy version 7, paused")
    text = "\n".join(lines)
    assert "\x1b[2J" not in text
    rates = next(line.split() for line in lines if "412.9" in line)
    assert rates == ["0.00", "0.00", "412.9", "86", "ms", "1.2", "s", "0.431", "94%"]
    assert next(line.split() for line in lines if "gpu-1" in line)[1:] == [
        *("silent", "6", "0", "0", "3", "0", "no", "weights")
    ]
    assert next(line.split() for line in lines if line.startswith("run")) == [
        "run",
        "3/4",
        "█" * 15 + "░" * 5,
    ]
    assert next(line.split() for line in lines if "http://a" in line)[1:] == ["up", "2", "-", "50%", "25%"]
    assert next(line.split() for line in lines if "http://b" in line)[1:] == ["down", "-", "-", "-", "-"]
