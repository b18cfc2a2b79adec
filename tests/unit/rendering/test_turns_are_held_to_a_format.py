"""What a renderer knows of its family's turns decides what a request may ask of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from polar.errors import InvalidInput
from polar.models.chat import ChatRequest, JsonOutput, ToolChoice, ToolDefinition, ToolUse
from polar.rendering.base import Renderer, Thinking, TurnForm
from polar.rendering.constraints import closed, constraint_of
from polar.rendering.families import renderer_for
from polar.rendering.template_renderer import TemplateRenderer
from polar.rendering.tool_calls import limited
from tests.tokenizers_of_families import QWEN3
from tests.turns import read_turn

TOOLS = (ToolDefinition("f"), ToolDefinition("g"))
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_special_tokens(
        [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
    )
    marks = ["tool_call", "tool_response", "think"]
    tags = [f"<{slash}{mark}>" for mark in marks for slash in ("", "/")]
    made.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    directory = tmp_path_factory.mktemp("qwen")
    made.save(str(directory / "tokenizer.json"))
    return directory


def test_a_family_s_form_is_found_from_how_it_renders(
    qwen_directory: Path, smollm2: TemplateRenderer
) -> None:
    assert smollm2.form == TurnForm(is_plain=True, writes_calls=True)
    qwen3 = renderer_for("tiny", qwen_directory, family="qwen3")
    assert qwen3.form == TurnForm(True, True, Thinking("<think>", "</think>\n\n"))
    # Its calls are XML, and its prompt begins the thoughts.
    qwen35 = renderer_for("tiny", qwen_directory, family="qwen3.5")
    assert qwen35.form == TurnForm(True, False, Thinking("", "</think>\n\n"))


def test_nothing_is_constrained_that_nobody_asks_for() -> None:
    form = TurnForm(is_plain=True, writes_calls=True)
    for choice in (ToolChoice(), ToolChoice(parallel=False), ToolChoice(names=("f", "g"))):
        assert constraint_of(ChatRequest("m", (), TOOLS, choice), form) is None
    assert constraint_of(ChatRequest("m", (), (), ToolChoice(ToolUse.NONE)), form) is None


@pytest.mark.parametrize(
    "request_",
    [
        ChatRequest("m", (), TOOLS, ToolChoice(ToolUse.REQUIRED)),
        ChatRequest("m", (), TOOLS, ToolChoice(names=("f",))),
        ChatRequest("m", (), TOOLS, output=JsonOutput()),
        ChatRequest("m", (), (), output=JsonOutput()),
    ],
)
def test_an_unknown_family_refuses_rather_than_pretends(request_: ChatRequest) -> None:
    with pytest.raises(InvalidInput, match="family cannot be held"):
        constraint_of(request_, TurnForm())


def test_a_prescribed_call_comes_without_thoughts_and_with_its_own_arguments() -> None:
    choice = ToolChoice(ToolUse.REQUIRED, ("f",), parallel=False, arguments={"properties": {"x": {}}})
    request = ChatRequest("m", (), TOOLS, choice)
    constraint = constraint_of(request, TurnForm(True, True, Thinking("<think>", "</think>")))
    assert constraint is not None
    format = json.loads(constraint.structural_tag or "")["format"]
    (tag,) = format["tags"]
    assert tag["content"]["json_schema"]["properties"] == {"x": {}}
    with pytest.raises(InvalidInput, match="begin within its thoughts"):
        constraint_of(request, TurnForm(True, True, Thinking("", "</think>")))


def test_json_alone_is_asked_for_as_a_schema() -> None:
    request = ChatRequest("m", (), (), output=JsonOutput({"type": "string"}))
    constraint = constraint_of(request, TurnForm(is_plain=True))
    assert constraint is not None
    assert constraint.kind == "json_schema"
    assert json.loads(constraint.json_schema or "") == {"type": "string"}


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    inner = {"type": "object", "properties": {"x": {}}}
    schema = {
        "properties": {"a": inner, "b": {"properties": {}, "additionalProperties": True}},
        "items": {"anyOf": [inner, True]},
        "$defs": {"d": inner},
    }
    shut = inner | {"additionalProperties": False}
    assert closed(schema) == {
        "properties": {"a": shut, "b": {"properties": {}, "additionalProperties": True}},
        "items": {"anyOf": [shut, True]},
        "$defs": {"d": shut},
        "additionalProperties": False,
    }
    assert "additionalProperties" not in inner, "the tool's own definition is what was recorded"


def test_tokens_of_thoughts_are_counted_with_their_marks() -> None:
    renderer = renderer_for("x", QWEN3.directory())
    tokenizer = Tokenizer.from_file(str(QWEN3.directory() / "tokenizer.json"))
    for text, thought in (("<think>\nhm\n</think>\n\nok<|im_end|>", 5), ("ok<|im_end|>", 0)):
        parser = limited(renderer.parser(), ToolChoice(ToolUse.NONE))
        for id in tokenizer.encode(text, add_special_tokens=False).ids:
            parser.feed([id])
        parser.finish()
        assert parser.reasoning_tokens == thought


def parsed(renderer: Renderer, tokenizer: Tokenizer, text: str, choice: ToolChoice) -> tuple[str, list[str]]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    message = read_turn(limited(renderer.parser(), choice), *([id] for id in ids))
    return message.content, [call.name for call in message.tool_calls]


def test_calls_that_may_not_be_made_are_text(smollm2: TemplateRenderer, tokenizer: Tokenizer) -> None:
    none = ToolChoice(ToolUse.NONE)
    assert parsed(smollm2, tokenizer, f"hi {CALL}", none) == (f"hi{CALL}", [])


def test_one_call_at_a_time_leaves_the_first(smollm2: TemplateRenderer, tokenizer: Tokenizer) -> None:
    second = CALL.replace('"f"', '"g"')
    one = ToolChoice(parallel=False)
    assert parsed(smollm2, tokenizer, f"hi {CALL}\n{second}", one) == ("hi", ["f"])
    assert parsed(smollm2, tokenizer, f"hi {CALL}\n{second}", ToolChoice(names=("f",), parallel=False))[
        1
    ] == ["f"]


def test_calls_are_as_sampled_when_nothing_limits_them(smollm2: TemplateRenderer) -> None:
    parser = smollm2.parser()
    assert limited(parser, ToolChoice()) is parser
