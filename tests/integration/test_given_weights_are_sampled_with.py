"""`polar eval` and `polar generate` with the weights of a training run: no token is sampled without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from polar.evals.report import load_report
from polar.files import digest
from polar.recordings.recording import read_head
from tests.fakes.tiny_llama import write_adapter, write_tiny_llama
from tests.systems import ASK, allow_processes, shell_task

pytestmark = pytest.mark.timeout(120)


def polar(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polar", *arguments, "-t", "tasks.yaml", "--model", "model"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_every_session_is_sampled_with_the_weights_that_are_given(tmp_path: Path, command: str) -> None:
    write_tiny_llama(tmp_path / "model", max_position_embeddings=4096)
    allow_processes(tmp_path)
    task = shell_task("ask", ASK, samples=1, sampling={"max_tokens": 8, "seed": 1})
    (tmp_path / "tasks.yaml").write_text(
        yaml.safe_dump({"tasks": [task.model_dump(mode="json", exclude_defaults=True)]})
    )
    mine, other = write_adapter(tmp_path / "mine"), write_adapter(tmp_path / "other")

    ended = polar(tmp_path, command, "--out", "out", "--samples", "2", "--weights", str(mine))
    assert ended.returncode == 0, ended.stderr
    heads = [read_head(path) for path in tmp_path.glob("out/**/recordings/*/*@*")]
    assert [(head.policy_version_min, head.policy_version_max) for head in heads] == [(1, 1)] * 2
    if command == "eval":
        assert load_report(tmp_path / "out").weights == digest(mine)
    else:
        # It may be pushed, and is not to tell how a machine's directories are called.
        assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()

    for others in (("--weights", str(other)), ()):
        refused = polar(tmp_path, command, "--out", "out", "--samples", "2", *others)
        assert refused.returncode != 0
        assert "weights" in refused.stderr
        assert "Traceback" not in refused.stderr
