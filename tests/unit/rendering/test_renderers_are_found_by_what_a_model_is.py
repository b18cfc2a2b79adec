"""A model's family is the one that renders as its chat template does, whatever the model is called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from polar.errors import InvalidInput, NotInstalled
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering import adapter
from polar.rendering.adapter import AdaptedRenderer
from polar.rendering.families import renderer_for
from polar.rendering.template_renderer import TemplateRenderer
from tests.tokenizers_of_families import (
    DEEPSEEK,
    GEMMA,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    QWEN3,
    QWEN25,
    Family,
    public_template,
    with_bytes,
    with_public_template,
)

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


def test_calls_in_no_known_form_are_refused(tmp_path: Path) -> None:
    directory = with_bytes(public_template("muse_glimmer"), tmp_path)
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
    with pytest.raises(InvalidInput, match="unknown family qwen9") as refused:
        renderer_for("x", QWEN25.directory(), family="qwen9")
    assert refused.value.hint is not None
    assert "known: template, chatml" in refused.value.hint
    assert "of the package renderers: qwen3, " in refused.value.hint


BY_TEMPLATE = [(QWEN25, "chatml"), (QWEN25, "qwen2.5"), (MISTRAL, "mistral"), (GEMMA, "gemma3")]


@pytest.mark.parametrize(("family", "name"), BY_TEMPLATE, ids=lambda each: getattr(each, "name", each))
def test_a_family_that_its_template_renders_can_be_named(family: Family, name: str) -> None:
    named, found = (renderer_for("x", family.directory(), family=given) for given in (name, None))
    assert named.name == "template"
    assert named.render(ASKED, TOOLS) == found.render(ASKED, TOOLS)


def test_gpt_oss_is_its_template_without_the_package_s_network(tmp_path: Path) -> None:
    directory = with_public_template(GPT_OSS, "gptoss", tmp_path)
    assert renderer_for("x", directory, family="gpt-oss").name == "template"


def test_a_name_that_the_template_contradicts_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"not one of mistral: it never writes \[INST\]"):
        renderer_for("x", QWEN25.directory(), family="mistral")


def without_template(directory: Path) -> Path:
    """Qwen2.5 as a checkpoint that was saved without its template."""
    shutil.copytree(QWEN25.directory(), directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_chatml_renders_a_model_that_has_no_template(tmp_path: Path) -> None:
    directory = without_template(tmp_path / "model")
    with pytest.raises(InvalidInput, match="it has no chat template"):
        renderer_for("x", directory)
    renderer = renderer_for("x", directory, family="chatml")
    prompt = b"".join(map(renderer.spelling, renderer.render(ASKED, ()))).decode()
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.call_form == "hermes"
    with pytest.raises(
        InvalidInput, match="mistral is rendered by the model's own chat template, and it"
    ) as no:
        renderer_for("x", directory, family="mistral")
    assert "save one as chat_template.jinja" in str(no.value.hint)


def test_tools_are_described_to_a_plain_template_only_if_asked(model_directory: Path) -> None:
    plain = renderer_for("x", model_directory)
    asked = renderer_for("x", model_directory, tool_prompt=True)
    assert plain.render(ASKED, TOOLS) == plain.render(ASKED, ())
    assert len(asked.render(ASKED, TOOLS)) > len(plain.render(ASKED, ())) + 40
    assert asked.render(ASKED, ()) == plain.render(ASKED, ())


NEITHER = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
"""A template that cannot be rendered turn by turn."""
NOTHING = "{% for m in messages %}<|a|>{{ m.content }}{% endfor %}"


def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(adapter, "import_module", absent)
    monkeypatch.setattr(adapter, "find_spec", lambda _name: None)


def test_the_package_is_asked_for_only_where_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = with_bytes(NOTHING, tmp_path)
    with pytest.raises(InvalidInput) as there:
        renderer_for("x", directory)
    without_package(monkeypatch)
    with pytest.raises(InvalidInput) as absent:
        renderer_for("x", directory)
    assert "no family of the package renderers has its control tokens" in str(there.value.hint)
    assert "pip install 'polar-rl[renderers]'" in str(absent.value.hint)
    with pytest.raises(NotInstalled, match="the package renderers is not installed") as named:
        renderer_for("x", QWEN3.directory(), family="qwen3")
    assert named.value.hint == "pip install 'polar-rl[renderers]'"
    with pytest.raises(InvalidInput, match="unknown family qwen9") as unknown:
        renderer_for("x", QWEN3.directory(), family="qwen9")
    assert "pip install" in str(unknown.value.hint)


def test_a_family_of_another_tokenizer_is_refused_with_the_token_that_is_missing() -> None:
    with pytest.raises(
        InvalidInput, match=r"not of this family: Special token '<\|begin_of_text\|>'"
    ) as said:
        renderer_for("x", QWEN3.directory(), family="llama-3")
    assert "pip install" not in str(said.value.hint)


def test_what_a_family_lacks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Package:
        def config_from_name(self, name: str) -> str:
            return name

        def create_renderer(self, _tokens: object, name: str) -> None:
            error = RuntimeError if name == "gpt-oss" else AssertionError
            raise error(f"{name}: cannot load its vocabulary\nand more")

    monkeypatch.setattr(adapter, "import_module", lambda _name: Package())
    caplog.set_level("INFO")
    with pytest.raises(InvalidInput):
        renderer_for("x", with_bytes(f"{NEITHER}{{# <|channel|> #}}", tmp_path))
    [failed] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "renderer gpt-oss: gpt-oss: cannot load its vocabulary" in failed.getMessage()
    [strange] = [record for record in caplog.records if "not of the families" in record.getMessage()]
    assert "qwen3, qwen3.5" in strange.getMessage()
    with pytest.raises(NotInstalled, match="cannot load its vocabulary") as named:
        renderer_for("x", with_bytes(NEITHER, tmp_path), family="gpt-oss")
    assert "may need a network" in str(named.value.hint)
