"""A model's family is the one that renders as its chat template does, whatever the model is called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from polar.errors import InvalidInput
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.adapter import AdaptedRenderer
from polar.rendering.families import renderer_for
from polar.rendering.template_renderer import TemplateRenderer
from tests.tokenizers_of_families import DEEPSEEK, LLAMA, QWEN3, QWEN25, Family, public_template, with_bytes

ASKED = [Message(Role.USER, "Hi")]
TOOLS = [ToolDefinition("bash", "Run.", {"type": "object"})]


@pytest.mark.parametrize("family", [QWEN25, QWEN3, LLAMA, DEEPSEEK], ids=lambda family: family.name)
def test_a_copy_under_any_name_is_rendered_as_its_family(family: Family, tmp_path: Path) -> None:
    copy = tmp_path / "my-finetune-of-llama-qwen3-deepseek"
    shutil.copytree(family.directory(), copy)
    found = renderer_for(str(copy), copy)
    named = renderer_for("-", family.directory(), family="template" if family is QWEN25 else family.name)
    call = Message(Role.ASSISTANT, "", "hm", (ToolCall("call_0", "bash", '{"command": "ls"}'),))
    for conversation in ([*ASKED], [*ASKED, call, Message(Role.TOOL, "a", tool_call_id="call_0")]):
        assert found.render(conversation, TOOLS) == named.render(conversation, TOOLS)


def test_a_template_that_shows_no_calls_leaves_them_to_a_family_that_does() -> None:
    assert isinstance(renderer_for("x", DEEPSEEK.directory()), AdaptedRenderer)


@pytest.mark.parametrize("template", ["gptoss", "gemma4"])
def test_what_cannot_be_rendered_turn_by_turn_is_refused_or_the_package_s(
    template: str, tmp_path: Path
) -> None:
    directory = with_bytes(public_template(template), tmp_path)
    with pytest.raises(InvalidInput, match="calls: they are in no known form"):
        renderer_for("x", directory, family="template")


def with_template(directory: Path, old: str, new: str) -> Path:
    """A copy of Qwen2.5 whose template says something else."""
    copy = directory / "Qwen2.5"
    shutil.copytree(QWEN25.directory(), copy)
    file = copy / "tokenizer_config.json"
    config = json.loads(file.read_text())
    assert old in config["chat_template"]
    config["chat_template"] = config["chat_template"].replace(old, new)
    file.write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("You may call one or more", "Feel free to call", "Feel free to call"),
        ('{\\"name\\": <function-name>', '{{\\"name\\": <function-name>', '\n{{"name": <function-name>'),
    ],
    ids=["other words", "the braces of Qwen2.5-Coder"],
)
def test_what_is_said_of_tools_is_the_template_s_own(tmp_path: Path, old: str, new: str, shown: str) -> None:
    renderer = renderer_for("x", with_template(tmp_path, old, new))
    prompt = b"".join(map(renderer.spelling, renderer.render(ASKED, TOOLS))).decode()
    assert renderer.name == "template"
    assert shown in prompt


def test_a_template_that_shows_tools_otherwise_is_rendered_as_it_is(tmp_path: Path) -> None:
    copy = with_template(tmp_path, "{{- tool | tojson }}", "{{- tool.function | tojson }}")
    renderer = renderer_for("Qwen/Qwen2.5-7B-Instruct", copy)
    assert isinstance(renderer, TemplateRenderer)
    assert (renderer.name, renderer.call_form) == ("template", "hermes")
    prompt = b"".join(map(renderer.spelling, renderer.render(ASKED, TOOLS))).decode()
    assert '<tools>\n{"name": "bash"' in prompt


def test_a_template_that_cannot_be_rendered_turn_by_turn_is_refused_with_the_proof_that_failed(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(QWEN3.directory(), copy)
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    with pytest.raises(InvalidInput, match="no control token ends a turn") as refused:
        renderer_for("x", copy)
    assert refused.value.hint is not None
    assert "nearest is qwen3, which differs in a question" in refused.value.hint


def test_the_default_system_message_is_the_template_s_own(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(QWEN25.directory(), copy)
    file = copy / "tokenizer_config.json"
    file.write_text(file.read_text().replace("You are Qwen, created by Alibaba Cloud.", "You are Kim."))
    renderer = renderer_for("x", copy)
    prompt = b"".join(map(renderer.spelling, renderer.render(ASKED, ()))).decode()
    assert prompt.startswith("<|im_start|>system\nYou are Kim. You are a helpful assistant.<|im_end|>\n")


def test_a_family_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidInput, match=r"engine\.renderer: qwen9") as refused:
        renderer_for("x", QWEN25.directory(), family="qwen9")
    assert refused.value.hint is not None
    assert "known: template, qwen3" in refused.value.hint


@pytest.mark.parametrize("name", ["chatml", "qwen2.5"])
def test_a_family_that_its_template_renders_is_refused_with_what_to_write(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name} is rendered by the model's own chat template") as refused:
        renderer_for("x", QWEN25.directory(), family=name)
    assert refused.value.hint is not None
    assert "leave engine.renderer out, or write template" in refused.value.hint


def test_tools_are_described_to_a_plain_template_only_if_asked(model_directory: Path) -> None:
    plain = renderer_for("x", model_directory)
    asked = renderer_for("x", model_directory, tool_prompt=True)
    assert plain.render(ASKED, TOOLS) == plain.render(ASKED, ())
    assert len(asked.render(ASKED, TOOLS)) > len(plain.render(ASKED, ())) + 40
    assert asked.render(ASKED, ()) == plain.render(ASKED, ())
