"""Says aloud that container engines are not started by this suite."""

from __future__ import annotations

import pytest

WHERE = {
    "docker": "`make test-containers` runs it on a real daemon",
    "podman": "`make test-containers` runs it for real",
    "apptainer": "no package of it is at hand; its orders are tested against a fake of its command line",
}


@pytest.mark.parametrize("engine", WHERE)
def test_conformance_of(engine: str) -> None:
    pytest.skip(f"conformance of {engine} is NOT TESTED here: {WHERE[engine]}")
