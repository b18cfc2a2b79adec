"""Which renderer a model gets: ChatML of our own, or a family the `renderers` package knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polar.errors import InvalidInput
from polar.rendering.base import Renderer
from polar.rendering.chatml import END, SMOLLM_SYSTEM, START, ChatML

_FOREIGN_MARKS = ("<tool_call>", "<think>", "<|vision_start|>", "<minimax:tool_call>")
"""Tokens of families that use ChatML's brackets but have a template with tools of their own."""


def renderer_for(model: str, directory: Path, *, keeps_thoughts: bool = False) -> Renderer:
    """The renderer of the model in `directory`; InvalidInput says which families work.

    With `keeps_thoughts` a conversation is also extended where the model's template drops earlier thoughts.
    """
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise InvalidInput(
            f"model {model}: {directory} has no tokenizer.json",
            hint="save the fast tokenizer beside the weights",
        )
    tokens = _added_tokens(tokenizer_file)
    if {START, END} <= tokens and not tokens.intersection(_FOREIGN_MARKS):
        return ChatML(tokenizer_file, default_system=SMOLLM_SYSTEM if _is_smollm(model, directory) else None)
    from polar.rendering.adapter import adapted_renderer

    adapted = adapted_renderer(model, tokenizer_file, keeps_thoughts=keeps_thoughts)
    if adapted is not None:
        return adapted
    raise InvalidInput(
        f"model {model}: no renderer for its chat template",
        hint="works with: SmolLM2 and plain ChatML; with pip install 'polar-rl[renderers]' also the families "
        "of that package (Qwen3 and later, GLM, DeepSeek, Kimi K2, MiniMax M2, Nemotron 3, Llama 3, "
        "Gemma 4, gpt-oss) under their exact Hugging Face names",
    )


def _added_tokens(tokenizer_file: Path) -> set[str]:
    try:
        document: dict[str, Any] = json.loads(tokenizer_file.read_text())
        return {token["content"] for token in document.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{tokenizer_file}: not a tokenizer file: {error}") from None


def _is_smollm(model: str, directory: Path) -> bool:
    if "smollm" in model.lower():
        return True
    templates = [*directory.glob("*.jinja"), directory / "tokenizer_config.json"]
    return any(SMOLLM_SYSTEM in path.read_text() for path in templates if path.is_file())
