"""A short run of `make test-fuzz`, always the same."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.targets import GatewayTarget
from tests.fuzz.trial import trial


async def test_malformed_requests_do_no_harm(tmp_path: Path) -> None:
    findings = await trial(tmp_path, seed=0, requests=2_000)
    assert not findings.faults, "\n".join(findings.faults)
    answered = {answer.split()[1] for answer in findings.statuses}
    assert answered >= {"200", "400", "401", "404", "closed"}, "the requests are of many kinds"


def test_a_request_follows_from_its_seed_and_number() -> None:
    target, other = GatewayTarget("key"), GatewayTarget("key")
    assert [target.request(1, n) for n in range(50)] == [other.request(1, n) for n in range(50)]
    assert target.request(1, 0) != target.request(2, 0)
