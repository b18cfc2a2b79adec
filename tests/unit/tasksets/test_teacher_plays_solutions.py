"""The teacher plays a task's solution to its end, through the engine client that sessions use."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer

from polar.engines.base import GenerateRequest
from polar.engines.vllm import VllmEngine
from polar.models.chat import FinishReason, Sampling, ToolDefinition
from polar.rendering.call_forms import FENCED, form_named
from tests.fakes.tiny_llama import write_tiny_llama
from tests.listening import listening

FILE = Path(__file__).parents[3] / "examples" / "grpo-pi" / "teacher.py"
ASK = "Copy a.txt to b.txt."
ROW: Mapping[str, Any] = {
    "instruction": ASK,
    "solutions": [
        [{"tool": "bash", "arguments": {"command": "cp a.txt b.txt"}}],
        [{"tool": "read", "arguments": {"path": "a.txt"}}, {"tool": "write", "arguments": {"path": "b.txt"}}],
    ],
}


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_pi_teacher", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEACHER = loaded()


def prompt(*turns: tuple[str, str]) -> str:
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{said}<|im_start|>assistant\n"


def played(seed: int) -> list[str]:
    """All that the teacher says until it is done."""
    teacher = TEACHER.Teacher([ROW])
    turns = [("system", "Help."), ("user", "Show the files."), ("assistant", "ls"), ("user", ASK)]
    said: list[str] = []
    while not said or said[-1] != TEACHER.DONE:
        said.append(teacher.answer(prompt(*turns), seed))
        turns += [("assistant", said[-1]), ("user", "<tool_response>\n(no output)\n</tool_response>")]
        assert len(said) < 10
    return said


def test_each_solution_is_played_to_its_end() -> None:
    ways = {tuple(played(seed)) for seed in range(20)}
    assert sorted(len(way) for way in ways) == [2, 3]
    assert all("<tool_call>" in turn for way in ways for turn in way[:-1])


def test_it_writes_calls_in_markdown_for_a_model_that_does() -> None:
    said = TEACHER.Teacher([ROW], FENCED).answer(prompt(("user", ASK)), 1)
    form = form_named(FENCED, "")
    assert form is not None
    tools = [ToolDefinition(name, "", {}) for name in ("bash", "read")]
    (call,) = form.calls(said, tools)
    assert json.loads(call.arguments) in ({"command": "cp a.txt b.txt"}, {"path": "a.txt"})
    assert "<tool_call>" not in said


def test_it_knows_tasks_in_the_words_of_their_taskset(tmp_path: Path) -> None:
    file = tmp_path / "taskset.yaml"
    file.write_text("format: humaneval\nsplit: train\ntemplate: {instruction: 'Do {{ entry_point }}.'}\n")
    assert TEACHER.rows(file)[0]["instruction"] == "Do has_close_elements."


def test_tasks_that_it_cannot_tell_apart_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="every task shares its instruction with another"):
        TEACHER.Teacher([ROW, ROW])
    teacher = TEACHER.Teacher([ROW, *({**ROW, "instruction": "Sing."},) * 2])
    assert "2 tasks are skipped" in capsys.readouterr().err
    assert teacher.answer(prompt(("user", "Sing.")), None) == TEACHER.DONE
    assert teacher.answer(prompt(("user", ASK)), None) != TEACHER.DONE


@pytest.mark.parametrize("name", ["grpo-pi/train.yaml", "public-tasks/humaneval.yaml"])
def test_it_knows_most_tasks_of_what_its_readers_are_told_to_give_it(name: str) -> None:
    rows = TEACHER.rows(FILE.parents[1] / name)
    teacher = TEACHER.Teacher(rows)
    known = [teacher.answer(prompt(("user", row["instruction"])), None) != TEACHER.DONE for row in rows]
    assert sum(known) > 0.9 * len(rows)


def test_what_it_does_not_know_it_leaves() -> None:
    assert TEACHER.Teacher([ROW]).answer(prompt(("user", "Sing.")), None) == TEACHER.DONE


@pytest.mark.parametrize(("limit", "end"), [(4096, FinishReason.STOP), (5, FinishReason.LENGTH)])
async def test_the_engine_client_understands_it(tmp_path: Path, limit: int, end: FinishReason) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_llama(tmp_path) / "tokenizer.json"))
    server = TEACHER.TeacherServer(TEACHER.Teacher([ROW]), tokenizer, "tiny")
    async with listening(server.app()) as url:
        engine = VllmEngine(url)
        await engine.check()
        ids = tokenizer.encode(prompt(("user", ASK)), add_special_tokens=False).ids
        request = GenerateRequest("one", ids, Sampling(max_tokens=limit, seed=1))
        chunks = [chunk async for chunk in engine.generate(request)]
        await engine.close()
    sampled = [id for chunk in chunks for id in chunk.ids]
    assert chunks[-1].finish_reason is end
    said = tokenizer.decode(sampled, skip_special_tokens=False)
    assert said.startswith("<tool_call>"[:limit])
    assert said.endswith("<|im_end|>") == (end is FinishReason.STOP)
