"""What a first render and an extension of a long conversation cost, by a family's renderer and by templates.

Each number is the CPU time of all threads in the fastest of many runs: a busy machine adds to a run, and
takes from none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.report import Row, at_most, report
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from polar.rendering.tokenizer import read_tokenizer
from tests.tokenizers_of_families import GEMMA, LLAMA, QWEN3, QWEN25, Family

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


def conversation(renderer: Renderer, seed: int) -> tuple[Message, ...]:
    """About as many tokens as wanted, none of them seen before, with calls where the template shows them."""
    messages = [Message(Role.SYSTEM, prose(seed, 40)), Message(Role.USER, prose(seed + 1, 10))]
    answers = TOKENS // 610
    for number in range(answers):
        said = prose(seed + 100 * number, 20)
        if renderer.call_form is None:
            messages += [Message(Role.ASSISTANT, "I see."), Message(Role.USER, said)]
        else:
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


def rows(family: Family, name: str | None) -> list[Row]:
    renderer = renderer_for("x", family.directory(), family=name)
    tools = TOOLS if renderer.call_form is not None else ()
    conversations = [conversation(renderer, 10_000 * (run + 1)) for run in range(RUNS)]
    first = fastest([partial(renderer.render, said, tools) for said in conversations])
    said = conversations[0]
    prompt = renderer.render(said, tools)
    text = b"".join(map(renderer.spelling, prompt)).decode()
    tokenizer = read_tokenizer(family.directory() / "tokenizer.json")
    alone = fastest([lambda: tokenizer.encode(text, add_special_tokens=False)] * RUNS)
    call = ToolCall("call_x", "tool_1", '{"path": "b.txt"}')
    turn, new = Message(Role.ASSISTANT, "I see."), Message(Role.USER, prose(5, 3))
    if tools:
        turn = Message(Role.ASSISTANT, tool_calls=(call,))
        new = Message(Role.TOOL, prose(5, 3), tool_call_id=call.id, name="tool_1")
    sampled = [*prompt[100:200], renderer.stop_token_ids[0]]

    def extended() -> None:
        assert renderer.bridge(prompt, sampled, (new,), history=(*said, turn), tools=tools) is not None

    extension = fastest([extended] * RUNS)
    what = f"{family.name} by {renderer.name}, {len(prompt):,} tokens"
    return [
        at_most(f"{what}: first render (peer: tokenising alone)", first, "ms", FIRST_GOAL_MS, peer=alone),
        at_most(f"{what}: extension", extension, "ms", EXTENSION_GOAL_MS),
    ]


def main() -> None:
    measured = [(QWEN25, "qwen2.5"), *((family, "template") for family in (QWEN25, QWEN3, LLAMA, GEMMA))]
    report("rendering", [row for family, name in measured for row in rows(family, name)])


if __name__ == "__main__":
    main()
