"""The way to a warm start: Pi asks the teacher, the check accepts, and tokens to fine-tune on come out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.weights import ensure_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo-pi"


@pytest.mark.sandbox
@pytest.mark.timeout(180)
def test_what_the_teacher_plays_through_pi_is_accepted(tmp_path: Path) -> None:
    ensure_tokenizer(DEFAULT_MODEL)
    taskset = tmp_path / "two.yaml"
    taskset.write_text((EXAMPLE / "train.yaml").read_text() + "limit: 2\n")
    teacher = subprocess.Popen(
        [sys.executable, EXAMPLE / "teacher.py", taskset, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert teacher.stdout is not None
        url = teacher.stdout.readline().removeprefix("ready ").strip()
        asked = f"generate --engine-url {url} --engine-mode tokens --model {DEFAULT_MODEL} --seed 1".split()
        done = subprocess.run(
            [sys.executable, "-m", "polar", *asked, "--taskset", taskset, "--out", tmp_path / "data"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    finally:
        teacher.kill()
        teacher.wait()
    assert "2 accepted" in done.stdout + done.stderr, done.stderr
    rows = pq.read_table(tmp_path / "data" / "tokens.parquet").to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    for row in rows:
        # A call, what Pi's tool said to it, and the end.
        assert row["completions"] == 2
        assert 0 < sum(row["loss_mask"]) < len(row["input_ids"]) - row["prompt_length"]
