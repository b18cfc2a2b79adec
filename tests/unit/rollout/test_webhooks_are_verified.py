"""`polar.webhooks.verify`: what the server signed passes; anything changed, old or repeated does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.models.task import WebhookEvent
from polar.models.views import Notice, TaskEnd
from polar.webhooks import SIGNATURE, InvalidNotice, Recent, ReplayedNotice, sign, verify

SECRET = "shared between two"
NOW = 1_800_000_000.0
NOTICE = Notice(id="n1", event=WebhookEvent.TASK_ENDED, task_id="t", at=NOW, task=TaskEnd())
BODY = NOTICE.model_dump_json().encode()


def headers(body: bytes = BODY, *, secret: str = SECRET, at: float = NOW) -> dict[str, str]:
    return {SIGNATURE.lower(): sign(secret, body, at)}


@given(st.floats(-299, 299))
def test_what_was_signed_just_now_passes(age: float) -> None:
    assert verify(SECRET, headers(at=NOW - age), BODY, now=NOW) == NOTICE


@given(st.integers(0, len(BODY) - 1), st.integers(1, 255))
def test_a_changed_body_is_refused(place: int, difference: int) -> None:
    forged = bytearray(BODY)
    forged[place] ^= difference
    with pytest.raises(InvalidNotice, match="signature"):
        verify(SECRET, headers(), bytes(forged), now=NOW)


@given(st.one_of(st.floats(301, 1e8), st.floats(-1e8, -301)))
def test_an_old_or_future_signature_is_refused(age: float) -> None:
    with pytest.raises(InvalidNotice, match="s old"):
        verify(SECRET, headers(at=NOW - age), BODY, now=NOW)


def test_the_moment_is_signed_too() -> None:
    moment = int(NOW)
    forged = headers(at=NOW - 1_000)[SIGNATURE.lower()].replace(f"t={moment - 1_000}", f"t={moment}")
    with pytest.raises(InvalidNotice, match="signature"):
        verify(SECRET, {SIGNATURE: forged}, BODY, now=NOW)


def test_another_secret_is_refused_and_while_it_changes_both_pass() -> None:
    with pytest.raises(InvalidNotice, match="signature"):
        verify("another one of them", headers(), BODY, now=NOW)
    assert verify(["another one of them", SECRET], headers(), BODY, now=NOW) == NOTICE


def test_what_was_handled_is_told_from_what_failed_in_between() -> None:
    seen = Recent()
    for _ in range(2):
        assert verify(SECRET, headers(), BODY, seen=seen, now=NOW) == NOTICE
    seen.add(NOTICE.id)
    with pytest.raises(ReplayedNotice, match="n1 has already been handled"):
        verify(SECRET, headers(at=NOW + 5), BODY, seen=seen, now=NOW)


def test_memory_of_what_was_handled_has_a_limit() -> None:
    seen = Recent(most=2)
    for id in "abc":
        seen.add(id)
    assert [id in seen for id in "abc"] == [False, True, True]


@given(st.text(max_size=80))
def test_any_other_header_is_refused_in_words(header: str) -> None:
    with pytest.raises(InvalidNotice):
        verify(SECRET, {SIGNATURE: header}, BODY, now=NOW)


def test_no_header_and_no_notice_are_refused_in_words() -> None:
    with pytest.raises(InvalidNotice, match="Polar-Signature header is missing"):
        verify(SECRET, {}, BODY, now=NOW)
    with pytest.raises(InvalidNotice, match="not a notice"):
        verify(SECRET, headers(b"{}"), b"{}", now=NOW)
