"""`polar top` computes rates and quantiles out of two looks at a server."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polar.app.vitals import Samples, Snapshot, Vitals, quantile
from polar.models.dashboard import Minute, NodeOverview, Overview
from polar.models.policy import PolicyView
from polar.models.session import SessionStatus

PAGE = """
polar_server_results_total{{status="completed"}} {results}
polar_server_results_total{{status="failed"}} 2.0
polar_gateway_sampled_tokens_total{{dialect="openai_chat",worker="0"}} {tokens}
polar_gateway_sampled_tokens_total{{dialect="openai_chat",worker="1"}} 5.0
polar_gateway_completions_total{{dialect="openai_chat",finish_reason="stop"}} {results}
polar_gateway_first_token_seconds_bucket{{dialect="openai_chat",le="0.1"}} {fast}
polar_gateway_first_token_seconds_bucket{{dialect="openai_chat",le="1.0"}} {results}
polar_gateway_first_token_seconds_bucket{{dialect="openai_chat",le="+Inf"}} {results}
polar_node_pool_occupied{{pool="run"}} 3.0
polar_node_pool_size{{pool="run"}} 4.0
polar_engine_up{{engine="http://a"}} 1.0
polar_engine_up{{engine="http://b"}} 0.0
polar_engine_requests_running{{engine="http://a"}} 2.0
polar_engine_prompt_tokens_total{{engine="http://a"}} 200.0
polar_engine_cached_tokens_total{{engine="http://a"}} 50.0
"""


def look(at: float, results: int, tokens: int, fast: int = 0) -> Snapshot:
    overview = Overview(
        at=at,
        sessions={SessionStatus.RUNNING: 3},
        nodes=(NodeOverview(name="n", seconds_silent=0.0, version=7, sessions={SessionStatus.RUNNING: 3}),),
        policy=PolicyView(version=7, is_paused=True),
        minutes=(
            Minute(at=0.0, ended=100, usable=100, mean_reward=1.0),
            *(Minute(at=60.0 * place) for place in range(1, 9)),
            Minute(at=540.0, ended=3, usable=3, mean_reward=0.5),
            Minute(at=600.0, ended=1, usable=0, mean_reward=0.1),
        ),
        changes=(),
    )
    return Snapshot(at, overview, Samples(PAGE.format(results=results, tokens=tokens, fast=fast)))


def test_rates_are_differences_over_time() -> None:
    vitals = Vitals.between(look(10.0, 0, 0), look(12.0, 10, 400, fast=5))
    assert vitals.sessions_per_second == vitals.completions_per_second == 5.0
    assert vitals.sampled_tokens_per_second == 200.0
    assert vitals.first_token_p50 == pytest.approx(0.1)
    assert 0.1 < (vitals.first_token_p95 or 0) < 1.0
    # The first minute is not recent any more.
    assert vitals.mean_reward == pytest.approx((3 * 0.5 + 0.1) / 4)
    assert vitals.usable_share == 0.75
    assert (vitals.policy_version, vitals.is_paused) == (7, True)
    (pool,) = vitals.pools
    assert (pool.name, pool.occupied, pool.size) == ("run", 3, 4)
    up, down = vitals.engines
    assert (up.running, up.waiting, up.kv_usage, up.prefix_hits) == (2, None, None, 0.25)
    assert (down.is_up, down.running) == (False, None)


def test_a_server_that_was_restarted_has_no_negative_rates() -> None:
    vitals = Vitals.between(look(10.0, 50, 900), look(12.0, 1, 3))
    assert vitals.sessions_per_second == vitals.sampled_tokens_per_second == 0.0


def test_nothing_new_has_no_quantile() -> None:
    same = look(10.0, 5, 5, fast=5)
    assert Vitals.between(same, look(11.0, 5, 5, fast=5)).first_token_p50 is None
    assert quantile({}, 0.5) is None


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
)
@example([3], 1.0, 1.0)
def test_quantiles_rise_and_stay_within_the_buckets(counts: list[int], one: float, other: float) -> None:
    bounds = [0.1 * 2**place for place in range(len(counts))]
    sums = [float(sum(counts[: place + 1])) for place in range(len(counts))]
    buckets = dict(zip(bounds, sums, strict=True)) | {float("inf"): sums[-1]}
    low, high = quantile(buckets, min(one, other)), quantile(buckets, max(one, other))
    if not sums[-1]:
        assert low is high is None
    else:
        assert low is not None
        assert high is not None
        assert 0.0 <= low <= high <= bounds[-1]
