"""The card of a generated dataset: what Hugging Face's tools need to load it, and what people ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from polar import __version__
from polar.tasksets.sft import Fate, Table, Written

CARD = "README.md"
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))

_TABLES = {
    Table.SFT: "accepted conversations: `messages` and `tools` (JSON text), the first `prompt_messages` of"
    " them the prompt",
    Table.TOKENS: "the same as tokens: `input_ids`, `labels` (-100 where not sampled), `loss_mask`,"
    " `logprobs`, `policy_versions`",
    Table.REJECTED: "conversations that were not accepted, as `messages`",
    Table.PREFERENCE: "pairs of the same task: `prompt`, `chosen`, `rejected`",
}


_HOW_TO_LOAD = """```python
from datasets import load_dataset

dataset = load_dataset("path/to/this", "sft", split="train")
```"""


def card(name: str, written: Written, made_with: Mapping[str, Any]) -> str:
    """README.md: front matter for `load_dataset`, then the facts."""
    rows = sum(written.rows.values())
    front = {
        "pretty_name": name,
        "task_categories": ["text-generation"],
        "tags": ["polar", "agent", "sft", "preference"],
        "size_categories": [next((word for limit, word in _SIZES if rows < limit), "n>1M")],
        "configs": [
            {
                "config_name": table.value,
                "data_files": table.file,
                **({"default": True} if table is Table.SFT else {}),
            }
            for table in Table
        ],
    }
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {name}",
        f"Made by `polar generate` (Polar {__version__}).",
        _table(("configuration", "rows", "holds"), [(t, written.rows.get(t, 0), _TABLES[t]) for t in Table]),
        _table(
            ("made with", ""),
            [(f"{key}", f"`{_cell(value)}`") for key, value in made_with.items() if value is not None],
        ),
        _table(
            ("sessions", ""),
            [
                *((fate, written.fates.get(fate, 0)) for fate in Fate),
                ("tasks", written.tasks),
                ("tasks with an accepted session", written.tasks_accepted),
                ("trained tokens", written.tokens),
            ],
        ),
        _HOW_TO_LOAD,
    ]
    return "\n\n".join(sections) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    """What stands inside backticks in a table: neither may end there."""
    return str(value).replace("`", "'").replace("|", "\\|").replace("\n", " ")
