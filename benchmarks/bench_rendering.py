"""What a first render and an extension of a long conversation cost, by the templates of several models.

Each number is the CPU time of all threads in the fastest of many runs: a busy machine adds to a run, and
takes from none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.report import Row, at_most, report
from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.weights import ensure_model
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.families import renderer_for
from polar.rendering.tokenizer import read_tokenizer
from tests.tokenizers_of_families import GEMMA, LLAMA, QWEN3, QWEN25

TOKENS = 10_000
RUNS = 100
FIRST_GOAL_MS = 15.0
EXTENSION_GOAL_MS = 1.5
TOOLS = tuple(
    ToolDefinition(
        f"tool_{number}",
        f"Reads part {number} of the workspace and says what there is to see in it.",
        {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    )
    for number in range(10)
)


def prose(seed: int, sentences: int) -> str:
    return " ".join(
        f"Line {seed + number} of the file reads the table, checks {number * 7} rows and prints their sum."
        for number in range(sentences)
    )


def conversation(seed: int) -> tuple[Message, ...]:
    """About as many tokens as wanted, none of them seen before."""
    messages = [Message(Role.SYSTEM, prose(seed, 40)), Message(Role.USER, prose(seed + 1, 10))]
    answers = TOKENS // 610
    for number in range(answers):
        said = prose(seed + 100 * number, 20)
        call = ToolCall(f"call_{number}", "tool_1", '{"path": "a.txt"}')
        messages += [
            Message(Role.ASSISTANT, tool_calls=(call,)),
            Message(Role.TOOL, said, tool_call_id=call.id, name="tool_1"),
        ]
    return tuple(messages)


def fastest(measured: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of CPU."""
    times = []
    for each in measured:
        started = time.process_time()
        each()
        times.append(time.process_time() - started)
    return min(times) * 1000


def rows(name: str, directory: Path) -> list[Row]:
    renderer = renderer_for("x", directory, tool_prompt=True)
    conversations = [conversation(10_000 * (run + 1)) for run in range(RUNS)]
    first = fastest([partial(renderer.render, said, TOOLS) for said in conversations])
    said = conversations[0]
    prompt = renderer.render(said, TOOLS)
    text = b"".join(map(renderer.spelling, prompt)).decode()
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    alone = fastest([lambda: tokenizer.encode(text, add_special_tokens=False)] * RUNS)
    call = ToolCall("call_x", "tool_1", '{"path": "b.txt"}')
    turn = Message(Role.ASSISTANT, tool_calls=(call,))
    new = Message(Role.TOOL, prose(5, 3), tool_call_id=call.id, name="tool_1")
    sampled = [*prompt[100:200], renderer.stop_token_ids[0]]

    def extended() -> None:
        assert renderer.bridge(prompt, sampled, (new,), history=(*said, turn), tools=TOOLS) is not None

    extension = fastest([extended] * RUNS)
    what = f"{name} by {renderer.name}, {len(prompt):,} tokens"
    return [
        at_most(f"{what}: first render (peer: tokenising alone)", first, "ms", FIRST_GOAL_MS, peer=alone),
        at_most(f"{what}: extension", extension, "ms", EXTENSION_GOAL_MS),
    ]


def main() -> None:
    measured = {DEFAULT_MODEL: ensure_model(DEFAULT_MODEL)}
    measured |= {family.name: family.directory() for family in (QWEN25, QWEN3, LLAMA, GEMMA)}
    report("rendering", [row for name, directory in measured.items() for row in rows(name, directory)])


if __name__ == "__main__":
    main()
