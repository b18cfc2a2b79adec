"""`polar serve --model DIRECTORY` and `--engine-url`: tokens mode, and a loop of tools by OpenAI's SDK."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from polar.models.session import SessionResult, SessionStatus
from polar.rendering.families import renderer_for
from suites.serving import roll_out, running_engine, serving, write_settings

pytestmark = pytest.mark.timeout(1800)

ASKED = "Read the file secret.txt with the tool, then tell me the number that is in it."
AGENT = f"""{sys.executable} - <<'PY'
import json, os
from openai import OpenAI
PATH = {{"type": "object", "properties": {{"path": {{"type": "string"}}}}, "required": ["path"]}}
FUNCTION = {{"name": "read_file", "description": "Reads a text file.", "parameters": PATH}}
READ = {{"type": "function", "function": FUNCTION}}
messages = [{{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}}]
with OpenAI(max_retries=0, timeout=600) as client:
    # The first turn must call: whether the model would is not what is tested here.
    for choice in ({{"type": "function", "function": {{"name": "read_file"}}}}, "auto"):
        answer = client.chat.completions.create(
            model=os.environ["POLAR_MODEL"], messages=messages, tools=[READ], tool_choice=choice,
            parallel_tool_calls=False, max_tokens=96,
        ).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or ():
            path = json.loads(call.function.arguments)["path"]
            said = "The number is 4711." if path.endswith("secret.txt") else "There is no such file."
            messages.append({{"role": "tool", "tool_call_id": call.id, "content": said}})
json.dump(messages, open("answer.txt", "w"))
PY
"""
NATURAL = AGENT.replace('{"type": "function", "function": {"name": "read_file"}}, "auto"', '"auto", "auto"')
"""The same agent, whose model calls by itself or not."""
USUAL = {"temperature": 0.3, "seed": 1}
"""What the model says as a rule: at 1.0 a small one writes a call in another form now and then."""


def check(result: SessionResult) -> None:
    """Every sampled token is trainable, in one trace, and was rendered by the model's own template."""
    assert (result.status, result.renderer) == (SessionStatus.COMPLETED, "template")
    assert result.logprobs_mode == "processed_logprobs"
    assert (result.stats.completions, result.stats.traces) == (2, 1)
    assert result.stats.trainable_tokens == result.stats.sampled_tokens > 0


def test_the_renderer_is_its_own_template(checkpoint: Path) -> None:
    renderer = renderer_for(str(checkpoint), checkpoint)
    assert renderer.name == "template"
    assert renderer.call_form is not None
    print(f"calls: {renderer.call_form}")


@pytest.mark.parametrize("way", ["--model", "--engine-url"])
def test_a_loop_of_tools_is_one_exact_trace(
    checkpoint: Path, engine_url: str | None, tmp_path: Path, way: str
) -> None:
    write_settings(tmp_path)
    with ExitStack() as parts:
        named = str(checkpoint)
        if way == "--engine-url":
            named = engine_url or parts.enter_context(running_engine(tmp_path, checkpoint))
        client = parts.enter_context(serving(tmp_path, way, named))
        result, completions = roll_out(client, "loop", AGENT, instruction=ASKED)
    check(result)
    assert [call.name for call in completions[0].response.tool_calls] == ["read_file"]


def test_it_calls_by_itself_in_the_form_that_is_named(
    checkpoint: Path, tool_form: str | None, tmp_path: Path
) -> None:
    if tool_form is None:
        pytest.skip("POLAR_CHECKPOINT_TOOL_FORM names no form")
    write_settings(tmp_path, tool_form=tool_form)
    with serving(tmp_path, "--model", str(checkpoint)) as client:
        result, completions = roll_out(client, "natural", NATURAL, instruction=ASKED, sampling=USUAL)
    check(result)
    assert completions[0].response.tool_calls
