"""The rehearsal of the published set-up, in small: every process and every push of weights, for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REHEARSE = Path(__file__).parents[2] / "examples" / "published" / "rehearse.py"
STEPS = 2


@pytest.mark.timeout(1800)
def test_the_published_set_up_is_rehearsed(tmp_path: Path) -> None:
    small = ["--shape", "tiny", "--steps", str(STEPS)]
    subprocess.run([sys.executable, str(REHEARSE), str(tmp_path / "out"), *small], check=True)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["faults"] == []
    assert [step["version"] for step in report["steps"]] == [2, 3]
    assert report["left_out"]["tokens_off_distribution"] > 0
    assert list(report["weights_pushed"]["bytes_by_kind"]) == ["BF16"]
    assert "# Rehearsal" in (tmp_path / "out" / "report.md").read_text()
