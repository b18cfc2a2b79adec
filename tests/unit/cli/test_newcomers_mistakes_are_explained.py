"""The mistakes of a first evening: each ends in a few lines that say what happened and what to do."""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar.app import own_system
from polar.cli.main import app
from polar.client.connection import server_token
from polar.config import plugins
from polar.errors import InvalidInput, PolarError
from polar.models.task import TaskSpec

LINES = 4
"""Typer says how a command is called, and then what is wrong."""
TASK = """
id: greet
instruction: Say hello.
harness: pi
evaluator: {name: command, options: {command: "true"}}
"""
RUN = """
out: runs/first
steps: 1
groups: 1
rollouts: {tasks: [task.yaml], samples: 2}
"""
FILES = {
    "task.yaml": TASK,
    "dash.yaml": TASK.replace("pi", "claude-code"),
    "evaluator.yaml": TASK.replace("name: command", "name: comand"),
    "option.yaml": TASK.replace("{command:", "{comand:"),
    "key.yaml": TASK.replace("instruction", "instructions"),
    "no-evaluator.yaml": TASK.partition("evaluator")[0],
    "tabs.yaml": "id: a\n\tinstruction: hi\n",
    "empty.yaml": "",
    "text.yaml": "Say hello.",
    "broken.json": '{"id": ',
    "run.yaml": RUN,
    "run-key.yaml": RUN.replace("groups", "gruops"),
    "run-steps.yaml": RUN.replace("steps: 1", "steps: many"),
    "run-tasks.yaml": RUN.replace("task.yaml", "gone.yaml"),
    "run-objective.yaml": RUN + "objective: {name: grop}\n",
    "run-out.yaml": RUN.replace("runs/first", "task.yaml"),
    "run-start.yaml": RUN + "model: {start: gone}\n",
    "run-held-out.yaml": RUN.replace("samples: 2", "samples: 2, held_out: {tasks: [gone.yaml]}"),
    "run-alone.yaml": RUN.replace("samples: 2", "samples: 1"),
    "polar-key.yaml": "enigne: {model: x}\n",
    "token": "one-word\n",
    "two-tokens": "one\ntwo\n",
}


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a newcomer's files, where no server runs."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.yaml").write_bytes(TASK.replace("hello", "h\xe9llo").encode("latin-1"))
    tasks = "".join(f"- {{id: t{n}, instruction: hi, harness: pi, samples: 0}}\n" for n in range(100))
    (tmp_path / "hundred.yaml").write_text(f"tasks:\n{tasks}")
    (tmp_path / "no-tasks").mkdir()
    (tmp_path / "not-a-database").mkdir()
    (tmp_path / "not-a-database" / "polar.db").write_text("this is no database" * 9)
    (tmp_path / "newer").mkdir()
    with sqlite3.connect(tmp_path / "newer" / "polar.db") as newer:
        newer.execute("create table alembic_version(version_num text)")
        newer.execute("insert into alembic_version values('9999_future')")
    newer.close()
    monkeypatch.chdir(tmp_path)
    for name in ("POLAR_TOKEN", "POLAR_SERVER", "POLAR_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def free() -> Iterator[str]:
    """An address at which nothing answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


MISTAKES = [
    # what is typed, the exit code, what is said
    ("sumbit task.yaml", 2, "No such command 'sumbit'. Did you mean 'submit'?"),
    ("submit task.yaml --wiat", 2, "No such option: --wiat (Possible options: --wait)"),
    ("submit", 1, "polar submit --help shows examples"),
    ("submit gone.yaml", 1, "gone.yaml: cannot be read: No such file"),
    ("submit no-tasks", 1, "no task files in this directory"),
    ("submit dash.yaml", 1, "did you mean 'claude_code'?"),
    ("submit task.yaml --harness claude-code", 1, "names have underscores"),
    ("submit task.yaml --samples 0", 2, "0 is not in the range"),
    ("submit task.yaml --run a/b", 1, "--run 'a/b': not a name"),
    ("submit task.yaml --token-file two-tokens", 1, "is not a token"),
    ("submit task.yaml --token-file gone", 1, "--token-file gone: cannot be read"),
    ("submit task.yaml", 1, "polar serve` was started, or set POLAR_TOKEN"),
    ("submit task.yaml --token-file token --server FREE", 1, "is `polar serve` running?"),
    ("sessions --token-file token --server localhost:8700", 1, "it begins with http:// or https://"),
    ("tasks check evaluator.yaml", 0, "evaluator 'comand' (did you mean 'command'?)"),
    ("tasks check option.yaml", 1, "evaluator.options.comand: unknown key"),
    ("tasks check key.yaml", 1, "did you mean 'instruction'?"),
    ("tasks check no-evaluator.yaml", 1, "evaluator: is required"),
    ("tasks check tabs.yaml", 1, "tabs.yaml:2:1: not YAML: found a tab"),
    ("tasks check latin.yaml", 1, "latin.yaml: not UTF-8 text"),
    ("tasks check empty.yaml", 1, "the file is empty"),
    ("tasks check text.yaml", 1, "must be a task, a list of tasks"),
    ("tasks check broken.json", 1, "broken.json:1:8: not JSON"),
    ("tasks check no-tasks", 1, "looked for .yaml"),
    ("serve --port 99999", 1, "server.port"),
    ("serve --data-dir task.yaml", 1, "task.yaml is a file, not a directory"),
    ("serve --data-dir /proc/polar --port 0", 1, "/proc/polar: cannot be written"),
    ("serve --data-dir not-a-database --port 0", 1, "is not a Polar database"),
    ("serve --data-dir newer --port 0", 1, "was made by a newer Polar"),
    ("serve --config gone.yaml", 1, "gone.yaml: cannot be read"),
    ("serve --config polar-key.yaml", 1, "did you mean 'engine'?"),
    ("serve --engine-url localhost:8000", 1, "must be a URL that begins with http://"),
    ("serve --engine-url FREE/v1 --port 0", 1, "is it running, and is this its address?"),
    ("serve --engine-kind vlm --port 0", 1, "known: auto, embedded, "),
    ("serve --engine-mode token", 1, "'auto', 'tokens' or 'chat'"),
    ("serve --host 0.0.0.0 --port 0", 1, "without TLS"),
    ("serve --weights gone", 2, "Directory 'gone' does not exist"),
    ("train gone.yaml", 1, "gone.yaml: cannot be read"),
    ("train", 2, "Missing argument"),
    ("train run-key.yaml", 1, "gruops: unknown key (did you mean 'groups'?)"),
    ("train run-steps.yaml", 1, "steps: Input should be a valid integer"),
    ("train run-objective.yaml", 1, "'grpo', 'dr_grpo'"),
    ("train run-out.yaml", 1, "task.yaml: is a file, not a directory"),
    ("train run-alone.yaml", 1, "rollouts.samples"),
    ("train run-start.yaml", 1, "model.start: gone: no such directory"),
    ("train run-held-out.yaml", 1, "gone.yaml: cannot be read"),
    ("train sft run.yaml", 1, "run.yaml: "),
    ("eval -t task.yaml", 2, "Missing option '--out'"),
    ("eval -t task.yaml --out e --harness pii", 1, "unknown name 'pii' (known: "),
    ("eval -t evaluator.yaml --out e", 1, "unknown evaluator 'comand'"),
    ("eval -t task.yaml --out e --runtime dokcer", 1, "unknown runtime 'dokcer'"),
    ("eval -t task.yaml --out task.yaml", 1, "task.yaml: is not a directory"),
    ("eval -t task.yaml --out /proc/polar", 1, "/proc/polar: cannot be written"),
    ("eval -t task.yaml --out e --fail-under pass1", 1, "for example pass@1=0.4"),
    ("compare gone gone", 1, "gone: no such directory"),
    ("compare no-tasks no-tasks", 1, "no-tasks: contains no report.json"),
    ("generate -t task.yaml --out task.yaml", 1, "task.yaml: is a file, not a directory"),
    ("show gone.rec", 1, "gone.rec: no such file"),
]


@pytest.mark.parametrize(("typed", "code", "said"), MISTAKES, ids=[typed for typed, _, _ in MISTAKES])
def test_a_mistake_ends_in_a_few_lines(typed: str, code: int, said: str, free: str) -> None:
    result = CliRunner().invoke(app, typed.replace("FREE", free).split())
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert said in result.stderr
    assert result.exit_code == code
    assert len(result.stderr.splitlines()) <= LINES
    assert not Path("e").exists(), "a refused evaluation leaves its directory free"


def test_a_hundred_mistakes_in_a_file_fit_a_screen() -> None:
    result = CliRunner().invoke(app, ["tasks", "check", "hundred.yaml"])
    lines = result.stderr.splitlines()
    assert lines[0] == "error: 200 problems:"
    assert len(lines) < 25
    assert lines[-1].endswith("and 180 more")


def test_a_file_that_is_no_token_is_not_shown() -> None:
    with pytest.raises(InvalidInput) as refused:
        server_token("a secret\nbeside others\n")
    assert "secret" not in str(refused.value)


async def test_a_system_of_ones_own_names_what_it_lacks_before_it_starts(desk: Path) -> None:
    task = TaskSpec(id="greet", instruction="x", harness="shell", evaluator="comand")
    said: list[str] = []
    settings = own_system.own_settings(desk / "out", None, {}, None)
    with pytest.raises(PolarError, match="unknown evaluator 'comand'"):
        async with own_system.rollout_server(settings, [task], said.append):
            pass
    assert not said
    assert "command" in plugins.names("evaluators")
