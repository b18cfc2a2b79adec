"""gpt-oss by its own template: turns are messages in channels, and end otherwise than they are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.families import renderer_for
from polar.rendering.template_renderer import TemplateRenderer
from tests.tokenizers_of_families import GPT_OSS, with_public_template
from tests.turns import read_turn

TOOLS = [ToolDefinition("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})]
ASKED = Message(Role.USER, "What is there?")
CALL = ToolCall("call_0", "look", '{"at": "a"}')
RESULT = Message(Role.TOOL, "a chair", tool_call_id="call_0", name="look")
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.fixture(scope="module", params=["template", "keep"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    directory = with_public_template(GPT_OSS, "gptoss", tmp_path_factory.mktemp("any-name"))
    renderer = renderer_for("x", directory, keeps_thoughts=request.param == "keep")
    assert isinstance(renderer, TemplateRenderer)
    return renderer


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    renderer = renderer_for(
        "x", with_public_template(GPT_OSS, "gptoss", tmp_path_factory.mktemp("my-finetune"))
    )
    assert isinstance(renderer, TemplateRenderer)
    return renderer


def spelt(renderer: TemplateRenderer, ids: list[int]) -> str:
    return b"".join(map(renderer.spelling, ids)).decode()


def read(renderer: TemplateRenderer, text: str) -> Message:
    return read_turn(renderer.parser(TOOLS), renderer.tokens.ids(text))


def test_the_model_s_own_template_is_taken(gpt_oss: TemplateRenderer) -> None:
    assert (gpt_oss.name, gpt_oss.call_form) == ("template", "harmony")
    assert {gpt_oss.spelling(id).decode() for id in gpt_oss.stop_token_ids} == {
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
    }


@pytest.mark.parametrize(
    "call",
    [
        ' to=functions.look<|channel|>commentary json<|message|>{"at": "a"}<|call|>',
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "a"}<|call|>',
        '<|channel|>analysis to=functions.look code<|message|>{"at": "a"}<|call|>',
        '<|channel|>commentary to=functions.look<|message|>{"at": "a"}',
    ],
    ids=["as the template", "as models write", "in the thoughts", "without its end"],
)
def test_a_call_is_read_in_every_place_of_its_recipient(gpt_oss: TemplateRenderer, call: str) -> None:
    assert read(gpt_oss, call).tool_calls == (replace(CALL, id=""),)
    preamble = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
    whole = read(gpt_oss, THOUGHT + preamble + call)
    assert whole == Message(Role.ASSISTANT, "I will look.", "hm", (replace(CALL, id=""),))


def test_thoughts_and_answers_flow_before_the_turn_is_over(gpt_oss: TemplateRenderer) -> None:
    parser = gpt_oss.parser(TOOLS)
    assert parser.feed(gpt_oss.tokens.ids("<|channel|>analysis<|message|>let me")).reasoning == "let me"
    assert parser.reasoning_tokens == 5
    assert not parser.feed(gpt_oss.tokens.ids("<|end|><|start|>assistant<|channel|>final<|message|>"))
    assert parser.reasoning_tokens == 6
    assert parser.feed(gpt_oss.tokens.ids("It is")).content == "It is"
    assert parser.feed(gpt_oss.tokens.ids(" dark.<|return|>")).content == " dark."
    assert not parser.finish()


def test_several_messages_of_one_kind_are_one_text(gpt_oss: TemplateRenderer) -> None:
    said = "<|channel|>commentary<|message|>First.<|end|><|start|>assistant"
    whole = read(gpt_oss, THOUGHT + said + THOUGHT + "<|channel|>final<|message|>Then.<|return|>")
    assert whole == Message(Role.ASSISTANT, "First.\n\nThen.", "hm\n\nhm")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hello<|return|>", "Hello"),
        (
            '<|channel|>commentary to=functions.look<|message|>{"at<|call|>',
            '<|channel|>commentary to=functions.look<|message|>{"at',
        ),
        (f"{THOUGHT}<|channel|>fin", ""),
        ("<|channel|>final<|message|>a<|channel|>final<|message|>b<|return|>", "a\n\nb"),
    ],
    ids=["no marks", "a call that is none", "cut in its header", "no end between"],
)
def test_what_is_malformed_stays_content(gpt_oss: TemplateRenderer, text: str, content: str) -> None:
    message = read(gpt_oss, text)
    assert (message.content, message.tool_calls) == (content, ())


MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"]
PIECES = st.sampled_from(
    [*MARKS, "assistant", "analysis", "final", " to=functions.look", "{}", "né", "👩🏽‍🚀"]
)


@settings(max_examples=150)
@given(st.lists(PIECES, max_size=14), st.integers(1, 9), st.integers(0, 2))
def test_a_stream_gives_what_the_whole_gives(
    gpt_oss: TemplateRenderer, pieces: list[str], size: int, lost: int
) -> None:
    ids = gpt_oss.tokens.ids("".join(pieces))
    ids = ids[: len(ids) - lost]
    split = [ids[n : n + size] for n in range(0, len(ids), size)]
    assert read_turn(gpt_oss.parser(TOOLS), *split) == read_turn(gpt_oss.parser(TOOLS), ids)


@pytest.mark.parametrize("said", ["", "I will look."], ids=["a call", "text and a call"])
def test_a_chain_of_calls_is_extended_with_its_thoughts(either: TemplateRenderer, said: str) -> None:
    """Also where the template could not show the turn: what was sampled is never rendered."""
    prompt = either.render([ASKED], TOOLS)
    preamble = f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant" if said else ""
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "a"}<|call|>'
    sampled = either.tokens.ids(THOUGHT + preamble + call)
    turn = Message(Role.ASSISTANT, said, "hm", (CALL,))
    bridge = either.bridge(prompt, sampled, [RESULT], history=[ASKED, turn], tools=TOOLS)
    assert bridge is not None
    assert spelt(either, bridge) == (
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"a chair"<|end|>'
        "<|start|>assistant"
    )
    assert either.render([ASKED, turn, RESULT], TOOLS)[-len(bridge) :] == bridge


def test_an_answer_is_shown_with_another_end_than_was_sampled(
    request: pytest.FixtureRequest, either: TemplateRenderer
) -> None:
    """By the template the next question begins a new trace; kept, it follows the sampled end."""
    answer, again = Message(Role.ASSISTANT, "Nothing."), Message(Role.USER, "And now?")
    prompt, text = either.render([ASKED], ()), "<|channel|>final<|message|>Nothing."
    history = [ASKED, answer]
    ended, cut = (
        either.bridge(prompt, either.tokens.ids(sampled), [again], history=history)
        for sampled in (f"{text}<|return|>", text)
    )
    asked = "<|start|>user<|message|>And now?<|end|><|start|>assistant"
    assert cut is not None
    assert spelt(either, cut) == f"<|end|>{asked}"
    assert prompt + either.tokens.ids(text) + cut == either.render([*history, again], ())
    if "keep" in request.node.name:
        assert ended is not None
        assert spelt(either, ended) == asked
    else:
        assert ended is None
