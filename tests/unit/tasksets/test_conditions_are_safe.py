"""Conditions say what they say and can do nothing else; what is wrong with one is named."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import InvalidInput
from polar.tasksets.expressions import NAMES, CannotJudge, parse_acceptance, parse_condition, session_names
from tests.fakes.recordings import recording

VALUES: dict[str, Any] = {
    "reward": 0.5,
    "components": {"tests": 1.0, "a b": 2, "items": 3},
    "name": "pi",
    "tags": ["x", "y"],
    "nothing": None,
    "flag": True,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("reward >= 0.5", True),
        ("reward > 0.5", False),
        ("0 < reward < 1", True),
        ("components.tests == 1", True),
        ('components["a b"] == 2', True),
        ("name in ['pi', 'codex']", True),
        ("'x' in tags and 'z' not in tags", True),
        ("tags[0] == 'x' and tags[1] == 'y'", True),
        ("not flag or reward < 0", False),
        ("nothing == none", True),
        ("nothing is none", True),
        ("tags | length == 2", True),
        ("components.items == 3", True),
        ("flag == true", True),
        ("reward > -1", True),
        ("reward", True),
        ("nothing", False),
        ("name == 'pi' and (reward == 1 or flag)", True),
        ("'i' in name", True),
        ("flag or absent > 1", True),
    ],
)
def test_a_condition_holds_as_it_reads(text: str, holds: bool) -> None:
    assert parse_condition(text, "--accept")(VALUES) is holds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[x for x in tags]", "expected token ','"),
        ("lambda: 1", "chunk after expression"),
        ("(reward := 1)", "expected token ')'"),
        ("reward >=", "unexpected 'end of template'"),
        ("reward > 1; reward", "chunk after expression"),
        ("", "unexpected 'end of template'"),
        ("reward }}{{ name", "chunk after expression"),
        ("nothing is None", "No test named 'None'"),
        ("reward == null", "jinja2 has no null (write none"),
        ("(" * 500 + ")" * 500, "nested too deeply"),
        ("not " * 5_000 + "x", "longer than 10000"),
        ("x" * 20_000, "longer than 10000"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_condition(text, "--accept")
    assert said in str(caught.value)
    assert str(caught.value).startswith("--accept: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("absent > 1", "'absent' is undefined; known: reward, components"),
        ("components.absent > 1", "unknown name 'absent'; known: tests, a b"),
        ("components.keys() == 1", "unknown name 'keys'"),
        ("name > 1", "'>' not supported between instances of 'str' and 'int'"),
        ("nothing >= 1", "'>=' not supported between instances of 'NoneType' and 'int'"),
        ("tags[7] == 'x'", "no element 7"),
        ("__import__('os').system('true')", "'__import__' is undefined"),
        ("name.__class__ == 1", "unsafe"),
        ("9 ** 99999999 > reward", "exponents above 1000"),
        ("'a' * 99999999 == name", "repetitions above 10000"),
        ("tags.append('z')", "unsafe"),
    ],
)
def test_values_it_cannot_judge_are_named(text: str, said: str) -> None:
    with pytest.raises(CannotJudge) as caught:
        parse_condition(text, "--accept")(VALUES)
    assert said in str(caught.value)


def test_an_unknown_name_is_refused_before_anything_runs() -> None:
    with pytest.raises(InvalidInput, match="--accept: unknown name 'rewrad'; known: agent_end, comp"):
        parse_acceptance("rewrad >= 1")


def test_every_name_that_is_promised_has_a_value() -> None:
    result = recording(reward=0.25).result
    names = session_names(result, "t", {"level": 3})
    assert set(names) == set(NAMES)
    for text in ("reward == 0.25", "components.right == 0.7", "metadata.level == 3", "seconds == 3.25"):
        assert parse_acceptance(text)(names)


def holding(text: str) -> bool:
    return parse_condition(text, "x")(VALUES)


@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    with suppress(InvalidInput):
        holding(text)


@given(st.lists(st.sampled_from(["reward", ".", "tests", "(", ")", " and ", " not ", "<", "1", "'s'", "["])))
def test_any_row_of_words_is_a_condition_or_refused(words: list[str]) -> None:
    with suppress(InvalidInput):
        holding("".join(words))
