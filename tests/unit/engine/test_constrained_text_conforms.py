"""What is sampled under a constraint conforms to it, and its logprobs are those of what was left possible."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from polar.engines.embedded import grammar
from polar.engines.embedded.grammar import Grammars
from polar.engines.embedded.model import SlotModel
from polar.engines.embedded.sampler import Draw, sample
from polar.engines.embedded.server import EmbeddedServer
from polar.models.chat import ChatRequest, JsonOutput, ToolChoice, ToolDefinition, ToolUse
from polar.rendering.base import Thinking, TurnForm
from polar.rendering.constraints import Constraint, constraint_of

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "sure": {"type": "boolean"}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}
TOOLS = (
    ToolDefinition(
        "f", "", {"properties": {"a": {"type": "string", "format": "of our own"}}, "required": ["a"]}
    ),
    ToolDefinition("g/x", "", {}),
)
F = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
G = '<tool_call>\n{"name": "g/x", "arguments": {"q": 1}}\n</tool_call>'
MORE = '<tool_call>\n{"name": "f", "arguments": {"a": "x", "b": 1}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
PLAIN = TurnForm(is_plain=True, writes_calls=True)
THINKS = TurnForm(is_plain=True, writes_calls=True, thinking=Thinking("<think>", "</think>\n\n"))
IS_THINKING = TurnForm(is_plain=True, writes_calls=True, thinking=Thinking("", "</think>\n\n"))
REQUIRED, NONE, AUTO = ToolUse.REQUIRED, ToolUse.NONE, ToolUse.AUTO
JSON = JsonOutput(SCHEMA)
ANSWER = '{"city": "Rome", "sure": true}'


@pytest.fixture
async def http(server: EmbeddedServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def complete(http: aiohttp.ClientSession, **body: Any) -> dict[str, Any]:
    defaults = {"prompt": list(range(30, 60)), "max_tokens": 150, "return_token_ids": True, "logprobs": 0}
    async with http.post("/v1/completions", json=defaults | body) as response:
        assert response.status == 200, await response.text()
        choice: dict[str, Any] = (await response.json())["choices"][0]
        return choice


@pytest.mark.parametrize("seed", range(3))
async def test_sampled_json_matches_its_schema_and_ends(http: aiohttp.ClientSession, seed: int) -> None:
    choice = await complete(http, seed=seed, structured_outputs={"json": SCHEMA})
    answer = json.loads(choice["text"])
    assert answer["city"] in ("Rome", "Oslo")
    assert isinstance(answer["sure"], bool)
    assert choice["finish_reason"] == "stop"


async def test_a_forced_call_is_sampled_as_the_renderer_reads_it(http: aiohttp.ClientSession) -> None:
    tool = ToolDefinition("look", "", SCHEMA)
    choice = ToolChoice(ToolUse.REQUIRED, parallel=False)
    constraint = constraint_of(ChatRequest("m", (), (tool,), choice), PLAIN)
    assert constraint is not None
    tag = {"structural_tag": constraint.structural_tag}
    answer = await complete(http, seed=1, structured_outputs=tag)
    assert re.fullmatch(r'<tool_call>\n\{"name": "look", "arguments": \{.*\}\}\n</tool_call>', answer["text"])
    assert answer["finish_reason"] == "stop"


async def test_logprobs_of_forced_tokens_are_zero_and_all_are_finite(http: aiohttp.ClientSession) -> None:
    choice = await complete(http, seed=1, structured_outputs={"json": {"const": "abc"}})
    assert choice["text"] == '"abc"'
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([0.0] * 6)


async def test_a_neighbour_under_constraint_changes_nothing_for_others(http: aiohttp.ClientSession) -> None:
    alone = await complete(http, seed=5, max_tokens=20)
    constrained = complete(http, seed=6, structured_outputs={"json": SCHEMA})
    together, _ = await _both(complete(http, seed=5, max_tokens=20), constrained)
    assert together["token_ids"] == alone["token_ids"]


async def _both(*calls: Any) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*calls))


async def test_chat_takes_openai_s_words_for_it(http: aiohttp.ClientSession) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "seed": 2,
        "max_tokens": 150,
        "response_format": wanted,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        content = (await response.json())["choices"][0]["message"]["content"]
    assert json.loads(content)["city"] in ("Rome", "Oslo")


async def test_a_bias_makes_a_token_certain_or_impossible(http: aiohttp.ClientSession) -> None:
    wanted = await complete(http, seed=1, max_tokens=8, logit_bias={"17": 100})
    assert wanted["token_ids"] == [17] * 8
    free = await complete(http, seed=1, max_tokens=8)
    banned = await complete(
        http, seed=1, max_tokens=8, logit_bias={str(id): -100 for id in free["token_ids"]}
    )
    assert not set(banned["token_ids"]) & set(free["token_ids"])


async def test_stop_tokens_beyond_the_vocabulary_harm_nobody(http: aiohttp.ClientSession) -> None:
    choice = await complete(
        http, seed=1, structured_outputs={"json": {"const": "abc"}}, stop_token_ids=[-1, 10**6]
    )
    assert choice["text"] == '"abc"'


def test_a_grammar_beyond_computing_fails_its_own_request_only(tiny: SlotModel) -> None:
    grammars = Grammars(tiny.text_tokenizer, tiny.vocabulary, tiny.eos_token_ids)
    broken = grammars.guide(Constraint(json_schema='{"type": "boolean"}'), tiny.eos_token_ids)
    assert not broken.accept(tiny.text_tokenizer.get_vocab()["x"])
    _, logprobs = sample(torch.zeros(2, tiny.vocabulary), [Draw(guide=broken), Draw()])
    assert math.isnan(logprobs[0])
    assert math.isfinite(logprobs[1])


def test_a_bias_is_added_before_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    expected = (torch.tensor([2.0, 4.0, 0.0]) / 2).log_softmax(-1)
    ids, logprobs = sample(logits, [Draw(temperature=2.0, seed=3, logit_bias=((1, 3.0),))])
    assert logprobs[0] == pytest.approx(float(expected[ids[0]]), abs=1e-6)
    assert logits.tolist() == [[2.0, 1.0, 0.0]], "the model's own logits stay as they are"


def test_penalties_are_for_tokens_that_were_sampled_and_part_of_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.8]])
    penalised = Draw(temperature=0.5, seed=3, presence_penalty=0.5, frequency_penalty=0.25)
    counts = torch.zeros(3)
    for _ in range(6):
        expected = ((logits[0] - 0.5 * (counts > 0) - 0.25 * counts) / 0.5).log_softmax(-1)
        ids, logprobs = sample(logits, [penalised])
        assert logprobs[0] == pytest.approx(float(expected[ids[0]]), abs=1e-6)
        counts[ids[0]] += 1
    assert logits.tolist() == [[pytest.approx(value) for value in (2.0, 1.9, 1.8)]]


def test_a_masked_distribution_is_renormalised(tiny: SlotModel) -> None:
    grammars = Grammars(tiny.text_tokenizer, tiny.vocabulary, tiny.eos_token_ids)
    guide = grammars.guide(Constraint(json_schema='{"type": "boolean"}'), tiny.eos_token_ids)
    left = [tiny.text_tokenizer.token_to_id(letter) for letter in "tf"]
    logits = torch.randn(1, tiny.vocabulary, generator=torch.Generator().manual_seed(0))
    expected = logits[0, left].log_softmax(-1)
    for _ in range(5):
        ids, logprobs = sample(logits, [Draw(guide=guide)])
        assert logprobs[0] == pytest.approx(float(expected[left.index(ids[0])]), abs=1e-5)


def _tokenizer(marks: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_end|>"])
    made.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return made


@pytest.fixture(
    scope="module",
    params=[[], ["<think>", "</think>", "<tool_call>", "</tool_call>"]],
    ids=["marks are text", "marks are tokens"],
)
def accepts(request: pytest.FixtureRequest) -> Callable[[Constraint, str], bool]:
    tokenizer = _tokenizer(request.param)
    end = tokenizer.get_vocab()["<|im_end|>"]
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), [end])

    def accept(constraint: Constraint, text: str) -> bool:
        guide = grammars.guide(constraint, [end])
        for id in [*tokenizer.encode(text).ids, end]:
            logits = torch.zeros(tokenizer.get_vocab_size())
            guide.mask(logits)
            if not torch.isfinite(logits[id]):
                return False
            guide.accept(id)
        return True

    return accept


@pytest.mark.parametrize(
    ("choice", "output", "form", "fitting", "other"),
    [
        (ToolChoice(REQUIRED), None, PLAIN, [F, G, f"{F}\n{G}"], ["hi", f"hi {F}", "", F[:-1], MORE]),
        (ToolChoice(REQUIRED, parallel=False), None, PLAIN, [F], [f"{F}\n{F}"]),
        (ToolChoice(REQUIRED, ("f",)), None, THINKS, [F, THOUGHT + F], [G, THOUGHT + G, THOUGHT]),
        (ToolChoice(REQUIRED), None, IS_THINKING, [f"hm</think>\n\n{F}"], [F]),
        (ToolChoice(NONE), None, PLAIN, ["hi", "a <tool_ call>", ""], [f"hi {F}"]),
        (ToolChoice(AUTO, ("f",)), None, PLAIN, ["hi", f"hi {F}", f"{F} and {F}"], [f"hi {G}"]),
        (ToolChoice(AUTO, ("f",), False), None, PLAIN, ["hi", f"hi {F}"], [f"{F} and {F}"]),
        (ToolChoice(), JSON, PLAIN, [F, ANSWER], ["hi", "{}", f"{ANSWER} {F}"]),
        (ToolChoice(), JSON, THINKS, [F, ANSWER, THOUGHT + ANSWER], ["hi", THOUGHT]),
        (ToolChoice(NONE), JSON, PLAIN, [ANSWER], [F, ANSWER[:-1] + ', "more": 1}']),
        (ToolChoice(NONE), JsonOutput(), PLAIN, ['{"a": [1, "b"]}', "[]"], ["hi", "{"]),
    ],
)
def test_a_turn_is_held_to_what_the_request_asks(
    accepts: Callable[[Constraint, str], bool],
    choice: ToolChoice,
    output: JsonOutput | None,
    form: TurnForm,
    fitting: list[str],
    other: list[str],
) -> None:
    constraint = constraint_of(ChatRequest("m", (), TOOLS, choice, output), form)
    assert constraint is not None
    assert [text for text in fitting if not accepts(constraint, text)] == []
    assert [text for text in other if accepts(constraint, text)] == []


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizer([])
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), [256])
    monkeypatch.setattr(grammar, "LLMatcher", compiling := Mock(wraps=LLMatcher))
    for _ in range(2):
        grammars.guide(Constraint(json_schema=json.dumps(SCHEMA)), [256])
    assert compiling.call_count == 1
