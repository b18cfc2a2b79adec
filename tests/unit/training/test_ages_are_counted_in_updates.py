"""A token's age is the number of updates since, whatever versions a stop in between has used up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polar.training.material import PolicyVersions

steps = st.integers(0, 20)


def ages(versions: PolicyVersions, *sampled: int) -> list[int]:
    found: list[int] = versions.staleness(np.array(sampled)).tolist()
    return found


def test_versions_are_counted_when_a_run_was_not_stopped() -> None:
    assert ages(PolicyVersions(5), 5, 4, 2) == [0, 1, 3]


def test_weights_given_out_again_are_no_older() -> None:
    """The checkpoint had version 5, and is now 6: what 5 sampled is of these very weights."""
    went_on = PolicyVersions(6, kept=5, again=6)
    assert ages(went_on, 6, 5, 4) == [0, 0, 1]
    assert ages(went_on.after_push(7), 7, 6, 5, 4) == [0, 1, 1, 2]


def test_what_lost_updates_sampled_is_as_far_as_they_went() -> None:
    """Versions 6 and 7 came after the checkpoint; nothing is left of them but what they sampled."""
    assert ages(PolicyVersions(8, kept=5, again=8), 5, 6, 7, 8) == [0, 1, 2, 0]


def test_updates_that_no_engine_was_given_are_counted() -> None:
    """Engines stay at 5 while three updates are made; the third reaches them as 6."""
    behind = PolicyVersions(5).after_update().after_push(5).after_update().after_push(5)
    assert ages(behind, 5, 4) == [2, 3]
    assert ages(behind.after_push(5), 5, 4) == [2, 3]
    caught_up = behind.after_update().after_push(6)
    assert ages(caught_up, 6, 5, 4) == [0, 3, 4]
    assert ages(caught_up.after_update().after_push(7), 7, 6, 5, 4) == [0, 1, 4, 5]


def test_a_checkpoint_that_no_engine_was_given_is_as_far_as_its_updates() -> None:
    """Written two updates after version 5, and given out as 6 when the run goes on."""
    kept = PolicyVersions(5).after_update().after_push(5).after_update().after_push(5).reached
    assert ages(PolicyVersions(6, kept=kept, again=6), 6, 5, 4) == [0, 2, 3]


@given(kept=steps, lost=steps, since=steps)
def test_no_token_is_younger_than_the_updates_that_followed_it(kept: int, lost: int, since: int) -> None:
    again = kept + lost + 1
    found = ages(PolicyVersions(again + since, kept=kept, again=again), *range(again + since + 1))
    assert found[kept] == found[again] == since
    assert min(found) == 0
    assert all(age >= since for age in found[: again + 1])
