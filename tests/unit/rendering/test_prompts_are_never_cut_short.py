"""A tokenizer's file may hold limits of whoever trained with it; prompts are rendered whole all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from polar.models.chat import Message, Role
from polar.rendering.families import renderer_for

ASKED = [Message(Role.SYSTEM, "Be good."), Message(Role.USER, "a long question " * 20)]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)


@pytest.mark.parametrize("family", ["template", "qwen3"])
def test_limits_in_a_tokenizer_file_do_not_cut_or_fill_up_prompts(family: str, tmp_path: Path) -> None:
    plain, limited = (tmp_path / name for name in ("plain", "limited"))
    for directory in (plain, limited):
        directory.mkdir()
        (directory / "chat_template.jinja").write_text(CHATML)
    tokenizer = _tokenizer(is_qwen=family == "qwen3")
    tokenizer.save(str(plain / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=32)
    tokenizer.enable_padding(pad_id=0, pad_token="!", length=64)
    tokenizer.save(str(limited / "tokenizer.json"))
    cut, whole = (renderer_for("tiny", each, family=family).render(ASKED, ()) for each in (limited, plain))
    assert cut == whole


def _tokenizer(*, is_qwen: bool) -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: id for id, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    if is_qwen:
        marks = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
        made.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return made
