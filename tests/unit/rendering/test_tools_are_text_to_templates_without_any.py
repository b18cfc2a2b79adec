"""A template that knows no tools shows calls and results as text, and tools where they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.errors import InvalidInput
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from tests.tokenizers_of_families import GEMMA, LLAMA, public_template, with_bytes

BASH = ToolDefinition(
    "bash",
    "Execute a command. It has a minute.",
    {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
     "required": ["command"]},
)  # fmt: skip
READ = ToolDefinition("read", "", {"type": "object", "properties": {"path": {"type": "string"}}})
ASKED = Message(Role.USER, "Count them.")
CALLED = Message(
    Role.ASSISTANT,
    "I will.",
    tool_calls=(ToolCall("a", "bash", '{"command":"ls"}'), ToolCall("b", "read", "")),
)
RESULTS = [Message(Role.TOOL, "x y", tool_call_id="a"), Message(Role.TOOL, "none", tool_call_id="b")]

WARM_START = """<|im_start|>system
Be good.

You can use these tools:
- bash(command: string, timeout?: number): Execute a command.
- read(path?: string)
To use a tool, write only this:
<tool_call>
{"name": "bash", "arguments": {"command": "ls -la"}}
</tool_call><|im_end|>
<|im_start|>user
Show the files.<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "bash", "arguments": {"command": "ls -la"}}
</tool_call><|im_end|>
<|im_start|>user
Run this command: echo hi > a.txt<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "bash", "arguments": {"command": "echo hi > a.txt"}}
</tool_call><|im_end|>
<|im_start|>user
Count them.<|im_end|>
<|im_start|>assistant
I will.
<tool_call>
{"name": "bash", "arguments": {"command": "ls"}}
</tool_call>
<tool_call>
{"name": "read", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
x y
</tool_response>
<tool_response>
none
</tool_response><|im_end|>
<|im_start|>assistant
"""
"""What the warm-start adapter of the quickstart was trained to read, word for word."""


def text_of(renderer: Renderer, ids: list[int]) -> str:
    return b"".join(map(renderer.spelling, ids)).decode()


@pytest.fixture(scope="module")
def prompting(model_directory: Path) -> Renderer:
    return renderer_for("x", model_directory, tool_prompt=True)


def test_the_tool_prompt_is_what_the_warm_start_was_trained_on(
    prompting: Renderer, tokenizer: Tokenizer
) -> None:
    system = Message(Role.SYSTEM, "Be good.")
    ids = prompting.render([system, ASKED, CALLED, *RESULTS], [BASH, READ])
    assert text_of(prompting, ids) == WARM_START
    assert ids == tokenizer.encode(WARM_START, add_special_tokens=False).ids


def test_tools_are_described_after_the_template_s_own_system_message(prompting: Renderer) -> None:
    said = text_of(prompting, prompting.render([ASKED], [BASH]))
    assert said.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n\n"
        "You can use these tools:\n"
    )
    silent = text_of(prompting, prompting.render([Message(Role.SYSTEM, ""), ASKED], [BASH]))
    assert silent.startswith("<|im_start|>system\nYou can use these tools:\n")


def test_calls_and_results_are_text_also_where_tools_are_not_described(model_directory: Path) -> None:
    renderer = renderer_for("x", model_directory)
    said = text_of(
        renderer, renderer.render([Message(Role.SYSTEM, "Be good."), ASKED, CALLED, *RESULTS], [BASH])
    )
    assert (
        said
        == "<|im_start|>system\nBe good.<|im_end|>\n"
        + WARM_START[WARM_START.index("<|im_start|>user\nCount") :]
    )


def test_results_of_parallel_calls_share_one_user_turn(prompting: Renderer) -> None:
    bridge = prompting.bridge([5], [6], RESULTS, history=[ASKED, CALLED], tools=[BASH])
    assert bridge is not None
    assert (
        text_of(prompting, bridge) == WARM_START[WARM_START.index("<|im_end|>\n<|im_start|>user\n<tool_r") :]
    )


@pytest.mark.parametrize("name", ["gemma3", "phi3_5"])
def test_any_template_without_tools_is_given_a_tool_prompt_if_asked(name: str, tmp_path: Path) -> None:
    directory = GEMMA.directory() if name == "gemma3" else with_bytes(public_template(name), tmp_path)
    renderer = renderer_for("x", directory, tool_prompt=True)
    assert (renderer.name, renderer.call_form) == ("template+tool_prompt", "hermes")
    said = text_of(renderer, renderer.render([ASKED, CALLED, *RESULTS], [BASH]))
    assert said.index("You can use these tools:") < said.index("Show the files.") < said.index("Count them.")
    assert said.index("I will.\n<tool_call>") < said.index("<tool_response>\nnone\n</tool_response>")


def test_a_template_with_tools_of_its_own_keeps_them() -> None:
    asked, plain = (renderer_for("x", LLAMA.directory(), tool_prompt=is_on) for is_on in (True, False))
    assert asked.name == "template"
    assert asked.render([ASKED], [BASH]) == plain.render([ASKED], [BASH])


def test_a_template_that_could_not_show_the_tool_prompt_is_refused_with_the_reason(tmp_path: Path) -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}{{ '<|turn|>' + m.content + '<|end|>' }}{% endfor %}"
    )
    directory = with_bytes(f"{template}<|turn|>", tmp_path)
    assert renderer_for("x", directory, family="template").render([ASKED], [BASH])
    with pytest.raises(InvalidInput, match=r"engine\.tool_prompt: its template shows no system message"):
        renderer_for("x", directory, family="template", tool_prompt=True)
