"""A conversation of several questions with Qwen3: by its template each begins a trace, kept it is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from polar.config.settings import GatewaySettings
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from polar.rendering.families import renderer_for
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow, read_capture
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.trace_oracle import assert_invariants
from tests.tokenizers_of_families import QWEN3

ANSWERS = [f"<think>\nThought {number}.\n</think>\n\nAnswer {number}." for number in range(3)]


async def conversation(capture: Path, *, keeps_thoughts: bool, echoes: bool) -> list[Completion]:
    """Three questions, each with the whole history; the harness may echo the thoughts or drop them."""
    directory = QWEN3.directory()
    engine = ScriptedEngine(Tokenizer.from_file(str(directory / "tokenizer.json")), ANSWERS)
    renderer = renderer_for(QWEN3.name, directory, keeps_thoughts=keeps_thoughts)
    async with (
        Gateway(GatewaySettings(), engine, renderer, engine.info) as gateway,
        aiohttp.ClientSession() as http,
    ):
        grant = SessionGrant("s", new_key(), capture, SamplingPin(), Budgets())
        gateway.open_session(grant)
        url = f"http://{gateway.host}:{gateway.port}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {grant.key}"}
        messages: list[Any] = []
        for number in range(3):
            messages.append({"role": "user", "content": f"Question {number}?"})
            body = {"model": engine.info.name, "messages": messages}
            async with http.post(url, json=body, headers=headers) as response:
                said = (await response.json())["choices"][0]["message"]
            assert (said["content"], said["reasoning_content"]) == (f"Answer {number}.", f"Thought {number}.")
            messages.append(said if echoes else {"role": "assistant", "content": said["content"]})
        await gateway.close_session("s")
    return read_capture(capture)


@pytest.mark.parametrize("echoes", [True, False])
@pytest.mark.parametrize(
    ("keeps_thoughts", "traces", "continued"), [(False, 3, {"drift": 2}), (True, 1, {"clean": 2})]
)
async def test_both_ways_are_exact(
    tmp_path: Path, keeps_thoughts: bool, traces: int, continued: dict[str, int], echoes: bool
) -> None:
    completions = await conversation(tmp_path / "capture", keeps_thoughts=keeps_thoughts, echoes=echoes)
    trajectory = PrefixMerging(PrefixMerging.Options()).build(grow(completions))
    assert_invariants(completions, trajectory)
    assert (len(trajectory.traces), trajectory.stats.drift) == (traces, continued)
    assert trajectory.stats.trainable_tokens == trajectory.stats.sampled_tokens
