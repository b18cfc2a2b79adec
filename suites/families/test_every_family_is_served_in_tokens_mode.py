"""`polar serve` with the real tokenizer and template of each family: tokens mode, and a loop of tools.

The models are tiny and random, and lie in directories whose names say nothing. Each has been taught one
call in its family's own form, which it makes by itself. What else it says is noise: models are not tested.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.models.session import SessionResult, SessionStatus
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from suites.serving import roll_out, running_engine, serving, write_settings
from tests.fakes.taught_model import Lesson, write_taught_model
from tests.tokenizers_of_families import (
    DEEPSEEK,
    GEMMA,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    QWEN3,
    QWEN25,
    Family,
    collected_template,
    public_template,
    with_template,
)

pytestmark = pytest.mark.timeout(900)

ASKED = "Read the file secret.txt with the tool, then tell me the number that is in it."
PATH = {"type": "object", "properties": {"path": {"enum": ["secret.txt"]}}, "required": ["path"]}
TOOL = ToolDefinition("read_file", "Reads a text file.", PATH)
ARGUMENTS = {"path": "secret.txt"}
AGENT = """{python} - <<'PY'
import json, os
from openai import OpenAI
TOOL = {{"type": "function", "function": json.loads('{tool}')}}
HELD = json.loads('{held}')
messages = [{{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}}]
with OpenAI(max_retries=0, timeout=600) as client:
    # By itself, then as the request holds it to, then by itself again if there is a result to answer.
    for held in ({{}}, HELD, {{}}):
        answer = client.chat.completions.create(
            model=os.environ["POLAR_MODEL"], messages=messages, tools=[TOOL], max_tokens=96, **held
        ).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or ():
            assert json.loads(call.function.arguments) == {{"path": "secret.txt"}}, call
            messages.append({{"role": "tool", "tool_call_id": call.id, "content": "The number is 4711."}})
        if not answer.tool_calls:
            break
json.dump(messages, open("answer.txt", "w"))
PY
"""
FORCED = {
    "tool_choice": {"type": "function", "function": {"name": TOOL.name}},
    "parallel_tool_calls": False,
}
NUMBER = {"type": "string", "enum": ["4711"]}
JSON = {"type": "json_schema", "json_schema": {"name": "number", "strict": True, "schema": NUMBER}}


@dataclass(frozen=True, slots=True)
class Case:
    """A family, and what a model of it must get."""

    family: Family
    architecture: str
    """As transformers calls it. Where the embedded engine cannot run the family's own, another's."""
    calls: str
    """The form of its calls."""
    renderer: str = "template"
    held_to: str | None = "json_schema"
    """What turns of the family can be held to: calls in Hermes form by a structural tag, else JSON."""
    template: Callable[[], str] | None = None
    """Gives the template where that in the package of the tokenizer is of another family, or missing."""
    name: str | None = None
    """What to call it, where not as the tokenizer's family."""

    def directory(self, into: Path) -> Path:
        if self.template is None:
            return self.family.directory()
        into.mkdir()
        return with_template(self.family, self.template(), into)


CASES = (
    Case(QWEN25, "qwen2", "hermes", held_to="structural_tag"),
    Case(QWEN3, "qwen3", "hermes", held_to="structural_tag"),
    Case(QWEN3, "qwen3_moe", "xml", template=partial(collected_template, "Qwen3-Coder"), name="qwen3-coder"),
    Case(LLAMA, "llama", "json"),
    Case(MISTRAL, "mistral", "json"),
    Case(DEEPSEEK, "deepseek_v3", "its family's own", renderer="deepseek-v3"),
    Case(GEMMA, "llama", "hermes", held_to="structural_tag"),
    Case(GPT_OSS, "llama", "harmony", held_to=None, template=partial(public_template, "gptoss")),
)


@dataclass(frozen=True, slots=True)
class Written:
    """A model in a directory, and the case that it is of."""

    case: Case
    directory: Path


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name or case.family.name)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    case: Case = request.param
    place = tmp_path_factory.mktemp("written")
    family = case.directory(place / "family")
    renderer = renderer_for("-", family)
    lesson = taught_call(renderer)
    name = f"some-checkpoint-{CASES.index(case)}"
    yield Written(
        case,
        write_taught_model(place / name, family, case.architecture, renderer.stop_token_ids, [lesson]),
    )
    shutil.rmtree(place)


def taught_call(renderer: Renderer) -> Lesson:
    """The call that the agent waits for, as the family's template shows it after the agent's question."""
    asked = Message(Role.USER, ASKED)
    call = Message(Role.ASSISTANT, tool_calls=(ToolCall("call00000", TOOL.name, json.dumps(ARGUMENTS)),))
    result = Message(Role.TOOL, "The number is 4711.", tool_call_id="call00000", name=TOOL.name)
    prompt = renderer.render([asked], [TOOL])
    shown = renderer.render([asked, call, result], [TOOL])[len(prompt) :]
    end = next(place for place, id in enumerate(shown) if id in renderer.stop_token_ids)
    return Lesson(prompt, shown[: end + 1])


def agent(case: Case) -> str:
    function = {"name": TOOL.name, "description": TOOL.description, "parameters": TOOL.parameters}
    held = {
        "structural_tag": FORCED,
        "json_schema": {"tool_choice": "none", "response_format": JSON},
        None: {},
    }[case.held_to]
    return AGENT.format(python=sys.executable, tool=json.dumps(function), held=json.dumps(held))


def diagnosed(directory: Path, url: str, model: Path) -> dict[str, str]:
    """What `polar doctor` says of an engine, by what it has checked."""
    command = [sys.executable, "-m", "polar", "doctor", "--json", "--engine", url, "--model", str(model)]
    said = subprocess.run(command, cwd=directory, capture_output=True, text=True).stdout
    findings = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {finding["name"]: finding["detail"] for finding in findings if finding["area"] == "engine"}


def check(case: Case, result: SessionResult) -> None:
    """One exact trace by the family's renderer, in which every sampled token can be trained."""
    assert (result.status, result.renderer) == (SessionStatus.COMPLETED, case.renderer)
    assert result.reward == 1.0
    assert result.logprobs_mode == "processed_logprobs"
    assert result.stats.traces == 1
    assert result.stats.trainable_tokens == result.stats.sampled_tokens > 0


@pytest.mark.parametrize("way", ["--model", "--engine-url"])
def test_a_loop_of_tools_is_one_exact_trace(written: Written, way: str, tmp_path: Path) -> None:
    case, directory = written.case, written.directory
    write_settings(tmp_path)
    with ExitStack() as parts:
        named = str(directory)
        if way == "--engine-url":
            named = parts.enter_context(running_engine(tmp_path, directory))
            renderer = diagnosed(tmp_path, named, directory)["renderer"]
            assert renderer.startswith(f"mode tokens: {case.renderer} (")
            assert f"; calls: {case.calls};" in renderer
        client = parts.enter_context(serving(tmp_path, way, named))
        result, (first, second, *_) = roll_out(
            client, "loop", agent(case), instruction=ASKED, sampling={"seed": 1}
        )
    assert "chat mode" not in (tmp_path / "serve.log").read_text()
    check(case, result)
    [call] = first.response.tool_calls
    assert (call.name, json.loads(call.arguments)) == (TOOL.name, ARGUMENTS)
    assert second.extra.get("constraint") == case.held_to
    match case.held_to:
        case "structural_tag":
            assert [call.name for call in second.response.tool_calls] == [TOOL.name]
        case "json_schema":
            assert json.loads(second.response.content) == "4711"
