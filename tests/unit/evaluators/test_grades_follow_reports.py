"""From a report to a reward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.evaluators.test_reports import Outcome, TestReport, make_report
from polar.evaluators.tests import Expected, TestReward, grade

P, F, E, S = Outcome.PASSED, Outcome.FAILED, Outcome.ERROR, Outcome.SKIPPED
ALL, SHARE = TestReward.ALL_PASS, TestReward.FRACTION


def report(**outcomes: Outcome) -> TestReport:
    return make_report(outcomes.items())


@pytest.mark.parametrize(
    ("tests", "exit_code", "all_pass", "fraction"),
    [
        (report(a=P, b=P), 0, 1.0, 1.0),
        (report(a=P, b=F), 1, 0.0, 0.5),
        (report(a=P, b=E, c=S), 1, 0.0, 0.5),
        (report(a=P, b=S), 0, 1.0, 1.0),
        (report(a=S), 0, 0.0, 0.0),
        (report(), 0, 0.0, 0.0),
        (report(a=P, b=F), 0, 0.0, 0.5),
        (report(a=P, b=P), 1, 0.0, 0.0),
        (report(a=P, b=P), -9, 0.0, 0.0),
    ],
    ids=str,
)
def test_all_tests_count_where_none_are_named(
    tests: TestReport, exit_code: int, all_pass: float, fraction: float
) -> None:
    assert grade(tests, exit_code, None, ALL).reward == all_pass
    assert grade(tests, exit_code, None, SHARE).reward == fraction


def test_only_expected_tests_count() -> None:
    expected = Expected(fail_to_pass=("a",), pass_to_pass=("b", "c"))
    good = grade(report(a=P, b=P, c=S, other=F), 1, expected, ALL)
    assert (good.reward, good.components["fail_to_pass"], good.components["pass_to_pass"]) == (1.0, 1.0, 1.0)
    broken = grade(report(a=P, b=F, c=P), 1, expected, SHARE)
    assert broken.reward == pytest.approx(2 / 3)
    assert broken.report == "no longer passes: b"


def test_a_skipped_or_missing_fix_is_no_fix() -> None:
    expected = Expected(fail_to_pass=("a",))
    for tests in (report(a=S, b=P), report(b=P)):
        graded = grade(tests, 0, expected, ALL)
        assert (graded.reward, graded.report) == (0.0, "should pass now, but does not: a")


def test_an_id_cut_off_in_its_parameters_stands_for_all_it_begins() -> None:
    expected = Expected(fail_to_pass=("t.py::test_x[log(a",))
    same = make_report([("t.py::test_x[log(a b)]", P), ("t.py::test_x[log(a c)]", P)])
    mixed = make_report([("t.py::test_x[log(a b)]", P), ("t.py::test_x[log(a c)]", F)])
    assert grade(same, 0, expected, ALL).reward == 1.0
    assert grade(mixed, 1, expected, ALL).reward == 0.0


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(Outcome)),
    st.integers(-1, 2),
    st.sets(st.sampled_from("abcdef")),
    st.sets(st.sampled_from("abcdef")),
)
def test_rewards_are_shares_and_one_means_all(
    outcomes: dict[str, Outcome], exit_code: int, fixed: set[str], kept: set[str]
) -> None:
    expected = Expected(fail_to_pass=tuple(fixed), pass_to_pass=tuple(kept))
    tests = make_report(outcomes.items())
    share, all_pass = (grade(tests, exit_code, expected, mode).reward for mode in (SHARE, ALL))
    assert 0.0 <= all_pass <= share <= 1.0
    if expected and all_pass == 1.0:
        assert all(outcomes.get(name) is P for name in fixed)
        assert share == 1.0
