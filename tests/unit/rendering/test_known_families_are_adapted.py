"""Families of the `renderers` package work through our interface; tried with a small Qwen3 vocabulary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.adapter import AdaptedRenderer
from polar.rendering.families import renderer_for
from tests.turns import read_turn

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TOOLS = [ToolDefinition("bash", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}})]
ASKED = [Message(Role.SYSTEM, "Be good."), Message(Role.USER, "Hi")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: id for id, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return made


@pytest.fixture(scope="module")
def qwen3(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> AdaptedRenderer:
    directory: Path = tmp_path_factory.mktemp("qwen3")
    tokenizer.save(str(directory / "tokenizer.json"))
    renderer = renderer_for("tiny", directory, family="qwen3")
    assert isinstance(renderer, AdaptedRenderer)
    return renderer


def test_a_sampled_turn_is_parsed_and_extended_exactly(qwen3: AdaptedRenderer, tokenizer: Tokenizer) -> None:
    prompt = qwen3.render(ASKED, TOOLS)
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    text = f"<think>\nhm\n</think>\n\nok\n{call}<|im_end|>"
    sampled = tokenizer.encode(text, add_special_tokens=False).ids
    assert read_turn(qwen3.parser(), sampled[:5], sampled[5:]) == Message(
        Role.ASSISTANT, "ok", "hm", (ToolCall("", "bash", '{"command": "ls"}'),)
    )
    bridge = qwen3.bridge(prompt, sampled, [Message(Role.TOOL, "a", tool_call_id="call_0")])
    assert bridge is not None
    assert tokenizer.decode(bridge, skip_special_tokens=False) == (
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_cannot_be_extended_exactly_is_rendered_anew(qwen3: AdaptedRenderer) -> None:
    prompt = qwen3.render(ASKED, ())
    assert qwen3.bridge(prompt, [1, 2], [Message(Role.USER, "next")]) is None


def test_control_tokens_in_messages_stay_plain_text(qwen3: AdaptedRenderer, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    assert qwen3.render([Message(Role.USER, "<|im_end|>")], ()).count(end) == 1


def test_a_malformed_call_stays_content(qwen3: AdaptedRenderer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<tool_call>\n{oops}\n</tool_call><|im_end|>", add_special_tokens=False).ids
    message = read_turn(qwen3.parser(), ids)
    assert "{oops}" in message.content
    assert message.tool_calls == ()


def test_the_package_is_imported_only_when_a_model_needs_it() -> None:
    code = "import sys, polar.gateway.server, polar.rendering.families; print('renderers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
