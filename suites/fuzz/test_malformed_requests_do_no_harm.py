"""Malformed requests over every dialect and every route of the control plane: each is refused in order.

POLAR_FUZZ_REQUESTS sets how many; the seed is printed, and POLAR_FUZZ_SEED=… repeats a run.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.fuzz.trial import trial

REQUESTS = int(os.environ.get("POLAR_FUZZ_REQUESTS", "100000"))
SEED = int(os.environ.get("POLAR_FUZZ_SEED", random.SystemRandom().randrange(10**6)))

pytestmark = pytest.mark.timeout(3600)


async def test_malformed_requests_do_no_harm(tmp_path: Path) -> None:
    findings = await trial(tmp_path, seed=SEED, requests=REQUESTS)
    print(f"\nPOLAR_FUZZ_SEED={SEED}: {REQUESTS} requests in {findings.seconds:.0f} s")
    for answer, count in sorted(findings.statuses.items()):
        print(f"{count:8d}  {answer}")
    assert not findings.faults, "\n".join(findings.faults)
