"""Tokens come from the distribution whose logprobs are reported."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polar.engines.embedded.sampler import Draw, sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def distribution(temperature: float = 1.0, keep: int = 6) -> torch.Tensor:
    scores = LOGITS / temperature
    scores[keep:] = -math.inf
    return scores.softmax(-1)


def draw_many(draw: Draw, count: int) -> tuple[torch.Tensor, list[float]]:
    ids, logprobs = sample(LOGITS.expand(count, -1), [draw] * count)
    return torch.bincount(torch.tensor(ids), minlength=6), logprobs


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (Draw(seed=1), distribution()),
        (Draw(temperature=0.5, seed=2), distribution(0.5)),
        (Draw(temperature=2.0, seed=3), distribution(2.0)),
        (Draw(top_k=3, seed=4), distribution(keep=3)),
        (Draw(top_p=0.8, seed=5), distribution(keep=3)),
        (Draw(temperature=2.0, top_k=4, top_p=0.99, seed=6), distribution(2.0, keep=4)),
    ],
)
def test_frequencies_match_the_distribution(draw: Draw, expected: torch.Tensor) -> None:
    count = 20_000
    counts, _ = draw_many(draw, count)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = float(
        ((counts[possible] - count * expected[possible]) ** 2 / (count * expected[possible])).sum()
    )
    assert statistic < 20.5, "beyond the 99.9th percentile of chi-square with five degrees of freedom"


def test_logprobs_are_of_the_cut_and_renormalised_distribution() -> None:
    expected = distribution(2.0, keep=3).log()
    draw = Draw(temperature=2.0, top_k=3, seed=0)
    for _ in range(20):
        ids, logprobs = sample(LOGITS[None], [draw])
        assert logprobs[0] == pytest.approx(float(expected[ids[0]]), abs=1e-6)


def test_greedy_takes_the_likeliest_token_and_reports_the_plain_softmax() -> None:
    ids, logprobs = sample(LOGITS[None], [Draw(temperature=0.0, top_k=1, top_p=0.1)])
    assert ids == [0]
    assert logprobs[0] == pytest.approx(float(LOGITS.log_softmax(-1)[0]), abs=1e-6)


def test_the_same_seed_draws_the_same_tokens_whatever_shares_the_batch() -> None:
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(0))
    alone, draw = [], Draw(seed=7)
    for row in logits:
        alone += sample(row[None], [draw])[0]
    among, draw, others = [], Draw(seed=7), [Draw(temperature=0.0), Draw(top_p=0.5, seed=1)]
    for row in logits:
        among += sample(row.expand(3, -1), [others[0], draw, others[1]])[0][1:2]
    assert alone == among


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.floats(1e-4, 10),
    st.floats(1e-6, 1),
    st.integers(0, 50),
    st.integers(0, 1000),
)
def test_any_draw_has_a_finite_logprob(
    logits: list[float], temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    (id,), (logprob,) = sample(torch.tensor([logits]), [Draw(temperature, top_p, top_k, seed)])
    assert 0 <= id < len(logits)
    assert -math.inf < logprob <= 0
