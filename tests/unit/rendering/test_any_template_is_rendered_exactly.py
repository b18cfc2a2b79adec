"""A renderer made from a chat template: ids as transformers gives them, exact extensions, turns read back.

Real tokenizers where a package carries them; other families' own templates with a vocabulary of bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import Renderer, Unrenderable
from polar.rendering.families import renderer_for
from polar.rendering.template import MessageForm, read_template, tool_fields
from polar.rendering.template_renderer import TemplateRenderer
from polar.rendering.tokenizer import read_tokenizer
from tests.tokenizers_of_families import (
    DEEPSEEK,
    GEMMA,
    GPT_OSS,
    LLAMA,
    LLAMA31,
    MISTRAL,
    QWEN3,
    QWEN25,
    collected_template,
    public_template,
    with_bytes,
    with_public_template,
)
from tests.turns import read_turn

REAL = {family.name: family for family in (QWEN25, QWEN3, LLAMA, MISTRAL, DEEPSEEK, GEMMA)}
PUBLIC = (
    "qwen3_5_think",
    "qwen3_5_nothink",
    "qwen3_6",
    "qwen3_instruct_2507",
    "glm4moe",
    "deepseekv3",
    "deepseek_r1_distill",
    "nemotron_3_nano",
    "lfm2_v2",
    "cohere2",
    "phi3_5",
    "gemma",
    "gemma4_v2",
    "gemma4_v5",
)
COLLECTED = (
    "moonshotai-Kimi-K2",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-V3.2",
    "GLM-4.7-Flash",
    "google-gemma-4-31B-it",
    "Mistral-Small-3.2-24B-Instruct-2506",
)


@dataclass(frozen=True, repr=False)
class Chosen:
    """A model with the renderer that it gets by default."""

    name: str
    renderer: Renderer
    reference: PreTrainedTokenizerFast

    def reference_ids(self, messages: list[Message], tools: list[ToolDefinition]) -> list[int]:
        form = MessageForm()
        if isinstance(self.renderer, TemplateRenderer):
            # There is no standard for messages: in which form this template takes them was found out there.
            form = self.renderer._form
            if self.renderer.tools_in_text is not None:
                messages, tools = self.renderer.tools_in_text.rewritten(messages, tools), []
        ids = self.reference.apply_chat_template(
            form.fields(messages),
            tools=[tool_fields(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            date_string="26 Jul 2024",
        )
        assert isinstance(ids, list)
        return ids


@dataclass(frozen=True, repr=False)
class Case(Chosen):
    """A model with its own template as the renderer, however it is found."""

    renderer: TemplateRenderer
    keeping: TemplateRenderer

    def turn(self, prompt: list[int], whole: list[int]) -> list[int]:
        """What follows a prompt up to the end of the turn: without it where the template writes another end
        than models sample, as if the turn had been cut short there."""
        place = next(
            (n for n in range(len(prompt), len(whole)) if whole[n] in self.renderer.stop_token_ids), 0
        )
        if place:
            return whole[len(prompt) : place + 1]
        ends = self.renderer.tokens.ids(HARMONY_END)
        return whole[len(prompt) : whole.index(ends[0], len(prompt))]


HARMONY_END = "<|end|>"


TEMPLATES = {GPT_OSS.name: (GPT_OSS, "gptoss"), LLAMA31.name: (LLAMA31, "llama3_1")}
"""Real tokenizers, and what TRL calls the templates that stand beside them."""
TWO = "one template without tools and one with them"
NAMES = (*REAL, *TEMPLATES, *PUBLIC, *COLLECTED, TWO)


def model_of(name: str, directory: Path) -> Path:
    """The directory of a model of this family, made in one that is empty where no package has it."""
    if name in REAL:
        return REAL[name].directory()
    if name in TEMPLATES:
        return with_public_template(*TEMPLATES[name], directory)
    if name == TWO:
        return with_two_templates(directory)
    template = collected_template if name in COLLECTED else public_template
    return with_bytes(template(name), directory)


def with_two_templates(directory: Path) -> Path:
    """A model as Hermes 2 Pro: calls and tools are shown only by the template that is for them."""
    with_bytes(public_template("qwen2_5"), directory)
    (directory / "additional_chat_templates").mkdir()
    (directory / "chat_template.jinja").rename(directory / "additional_chat_templates" / "tool_use.jinja")
    (directory / "chat_template.jinja").write_text(PLAIN)
    return directory


PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name: str = request.param
    directory = model_of(name, tmp_path_factory.mktemp(name))
    renderer, keeping = (
        renderer_for("x", directory, family="template", keeps_thoughts=keeps) for keeps in (False, True)
    )
    assert isinstance(renderer, TemplateRenderer)
    assert isinstance(keeping, TemplateRenderer)
    return Case(name, renderer, PreTrainedTokenizerFast.from_pretrained(directory), keeping)


TEXTS = st.text("ab é🙂\n{\"'<>|", max_size=12).map(lambda text: f"a{text.replace('<|', '')}z")
"""Begin and end with no white space, which templates trim, and spell no control token."""
THOUGHTS = st.none() | TEXTS.map(lambda text: f"I think {text}")
TOOL = ToolDefinition(
    "bash",
    "Runs.",
    {
        "type": "object",
        "properties": {"command": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}},
    },
)
KINDS = {"command": TEXTS, "n": st.integers(-99, 99), "b": st.booleans()}
ARGUMENTS = st.fixed_dictionaries({}, optional=KINDS).map(lambda given: json.dumps(given, ensure_ascii=False))


@st.composite
def called(draw: st.DrawFn) -> list[Message]:
    """A turn that calls, and the results."""
    count = draw(st.integers(1, 2))
    calls = tuple(ToolCall(f"call_{n}", "bash", draw(ARGUMENTS)) for n in range(count))
    turn = Message(Role.ASSISTANT, "", draw(THOUGHTS), calls)
    return [turn, *(Message(Role.TOOL, draw(TEXTS), tool_call_id=call.id, name="bash") for call in calls)]


@st.composite
def conversations(draw: st.DrawFn, *, has_calls: bool) -> list[list[Message]]:
    """Parts that each begin with the assistant's turn, but for the first."""
    system = [Message(Role.SYSTEM, draw(TEXTS))] if draw(st.booleans()) else []
    parts = [[*system, Message(Role.USER, draw(TEXTS))]]
    for _ in range(draw(st.integers(1, 4))):
        if has_calls and draw(st.booleans()):
            parts.append(draw(called()))
        else:
            thought = draw(THOUGHTS)
            parts.append([Message(Role.ASSISTANT, draw(TEXTS), thought), Message(Role.USER, draw(TEXTS))])
    return parts


def drawn(case: Case, data: st.DataObject) -> tuple[list[list[Message]], list[ToolDefinition]]:
    has_calls = case.renderer.calls is not None
    parts = data.draw(conversations(has_calls=has_calls))
    # Without tools its other template shows no calls.
    needs_tools = case.name == TWO and any(part[0].tool_calls for part in parts)
    return parts, [TOOL] if has_calls and (needs_tools or data.draw(st.booleans())) else []


def shown(case: Chosen, messages: list[Message], tools: list[ToolDefinition]) -> list[int]:
    try:
        return case.renderer.render(messages, tools)
    except Unrenderable:
        assume(False)
        raise


FEW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(st.data())
def test_ids_are_those_of_transformers(case: Case, data: st.DataObject) -> None:
    parts, tools = drawn(case, data)
    messages = [message for part in parts for message in part]
    assert shown(case, messages, tools) == case.reference_ids(messages, tools)


DEEPSEEK_DIFFERS = ["thoughts before a call", "a call and its result", "parallel calls"]
"""Where the package's DeepSeek V3 is not as the template, which loses calls beside text, and the end of a
turn with one call."""


@pytest.fixture(scope="module", params=NAMES)
def chosen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chosen:
    name: str = request.param
    directory = model_of(name, tmp_path_factory.mktemp(name))
    return Chosen(name, renderer_for("x", directory), PreTrainedTokenizerFast.from_pretrained(directory))


def test_the_template_itself_is_chosen_but_for_deepseek_v3(chosen: Chosen) -> None:
    if chosen.name != DEEPSEEK.name:
        assert chosen.renderer.name == "template"
        return
    assert chosen.renderer.name == DEEPSEEK.name
    template = read_template(DEEPSEEK.directory(), read_tokenizer(DEEPSEEK.directory() / "tokenizer.json"))
    assert template is not None
    assert template.differences(chosen.renderer) == DEEPSEEK_DIFFERS
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    assert all(f"`{what}`" in page for what in DEEPSEEK_DIFFERS)


@FEW
@given(st.data())
def test_ids_of_the_renderer_that_is_chosen_are_those_of_transformers(
    chosen: Chosen, data: st.DataObject
) -> None:
    calls = isinstance(chosen.renderer, TemplateRenderer) and chosen.renderer.calls is not None
    parts = data.draw(conversations(has_calls=calls))
    tools = [TOOL] if data.draw(st.booleans()) else []
    messages = [message for part in parts for message in part]
    assert shown(chosen, messages, tools) == chosen.reference_ids(messages, tools)


def check_extension(case: Case, parts: list[list[Message]], tools: list[ToolDefinition]) -> None:
    """It is what the template gives, or there is none where the template shows the past in another way."""
    before = [message for part in parts[:-1] for message in part]
    turn, *new = parts[-1]
    prompt = shown(case, before, tools)
    whole = shown(case, [*before, turn, *new], tools)
    stays = whole[: len(prompt)] == prompt
    sampled = case.turn(prompt, whole) if stays else otherwise_sampled(case, turn)
    history = [*before, turn]
    bridge = case.renderer.bridge(prompt, sampled, new, history=history, tools=tools)
    if not stays:
        assert bridge is None
    elif bridge is not None:
        assert prompt + sampled + bridge == whole
    else:
        assert turn.reasoning is not None
        assert case.renderer.thinking is not None
    kept = case.keeping.bridge(prompt, sampled, new, history=history, tools=tools)
    assert kept is not None
    assert whole[-len(kept) :] == kept


def otherwise_sampled(case: Case, turn: Message) -> list[int]:
    """Some tokens that end the turn, and its thoughts: those that are cut short are ended by the bridge."""
    thinking = case.renderer.thinking
    thoughts = case.renderer.tokens.ids(thinking.end) if thinking and turn.reasoning else []
    return [5, *thoughts, case.renderer.stop_token_ids[0]]


@FEW
@given(st.data())
def test_extensions_are_what_the_template_gives(case: Case, data: st.DataObject) -> None:
    check_extension(case, *drawn(case, data))


def test_thoughts_in_two_turns_are_extended_too(case: Case) -> None:
    called = Message(Role.ASSISTANT, "", "I think az", (ToolCall("call_0", "bash", "{}"),))
    result = Message(Role.TOOL, "az", tool_call_id="call_0", name="bash")
    answered = Message(Role.ASSISTANT, "az", "I think az")
    asked = Message(Role.USER, "az")
    between = [[called, result]] if case.renderer.calls is not None else [[answered, asked]]
    check_extension(case, [[asked], *between, [answered, asked]], [])


@FEW
@given(st.data())
def test_turns_are_read_back_however_they_are_split(case: Case, data: st.DataObject) -> None:
    parts, _ = drawn(case, data)
    tools = [TOOL] if case.renderer.calls is not None else []
    before = [message for part in parts[:-1] for message in part]
    turn, *new = parts[-1]
    prompt, whole = shown(case, before, tools), shown(case, [*before, turn, *new], tools)
    if whole[: len(prompt)] != prompt:
        return  # the template shows another turn than was sampled
    sampled = case.turn(prompt, whole)
    text = b"".join(map(case.renderer.spelling, sampled)).decode()
    messages = []
    for size in (1, data.draw(st.integers(2, 9)), len(sampled)):
        pieces = [sampled[n : n + size] for n in range(0, len(sampled), size)]
        messages.append(read_turn(case.renderer.parser(tools, prompt), *pieces))
    assert messages[0] == messages[1] == messages[2]
    read = messages[0]
    assert read.content == turn.content
    assert read.reasoning == (turn.reasoning if turn.reasoning and turn.reasoning in text else None)
    assert [(call.name, json.loads(call.arguments)) for call in read.tool_calls] == [
        (call.name, json.loads(call.arguments))
        for call in turn.tool_calls[: 1 if case.renderer.has_one_call else None]
    ]


def test_control_tokens_in_messages_stay_plain_text(case: Case) -> None:
    renderer = case.renderer
    stop = renderer.stop_token_ids[0]
    spelt = renderer.spelling(stop).decode()
    asked = [Message(Role.USER, "a x z")]
    forged = [Message(Role.USER, f"a {spelt} z")]
    assert renderer.render(forged, ()).count(stop) == renderer.render(asked, ()).count(stop)
    text = b"".join(map(renderer.spelling, renderer.render(forged, ()))).decode()
    assert f"a {spelt} z" in text
    answer = Message(Role.ASSISTANT, "yes")
    plain, tried = (
        case.keeping.bridge([5], [6, stop], new, history=[*asked, answer]) for new in (asked, forged)
    )
    assert plain is not None
    assert tried is not None
    assert plain.count(stop) == tried.count(stop)


def test_a_turn_that_was_cut_short_is_closed(case: Case) -> None:
    asked, answer, new = Message(Role.USER, "a"), Message(Role.ASSISTANT, "yes"), [Message(Role.USER, "b")]
    ended, cut = (
        case.keeping.bridge([5], ids, new, history=[asked, answer])
        for ids in ([6, case.renderer.stop_token_ids[0]], [6])
    )
    assert ended is not None
    assert cut is not None
    assert cut[0] in (*case.renderer.stop_token_ids, *case.renderer.tokens.ids(HARMONY_END))
    assert cut[1:] == ended or cut[0] != case.renderer.stop_token_ids[0]


def test_thoughts_that_were_cut_short_are_closed_too(case: Case) -> None:
    if case.renderer.thinking is None:
        return
    turn = Message(Role.ASSISTANT, "", "I wonder")
    history, new = [Message(Role.USER, "a"), turn], [Message(Role.USER, "b")]
    bridge = case.keeping.bridge([5], [6], new, history=history)
    assert bridge is not None
    text = b"".join(map(case.renderer.spelling, bridge)).decode()
    assert text.lstrip().startswith(case.renderer.thinking.end.strip())


@pytest.mark.parametrize("is_listed", [False, True], ids=["in files", "in the tokenizer's settings"])
def test_the_template_for_tools_renders_where_tools_are_offered(tmp_path: Path, is_listed: bool) -> None:
    directory = with_two_templates(tmp_path)
    if is_listed:
        files = {
            "default": directory / "chat_template.jinja",
            "tool_use": directory / "additional_chat_templates" / "tool_use.jinja",
        }
        named = [{"name": name, "template": file.read_text()} for name, file in files.items()]
        for file in files.values():
            file.unlink()
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chosen = Chosen("two", renderer_for("x", directory), PreTrainedTokenizerFast.from_pretrained(directory))
    asked = [Message(Role.USER, "a")]
    assert chosen.renderer.call_form == "hermes"
    for tools in ([], [TOOL]):
        ids = chosen.renderer.render(asked, tools)
        assert ids == chosen.reference_ids(asked, tools)
        assert (b"<tools>" in b"".join(map(chosen.renderer.spelling, ids))) is bool(tools)


@pytest.mark.parametrize("apart", [["tool_use"], ["default", "tool_use"]], ids=str)
@pytest.mark.parametrize("has_file", [False, True], ids=["in the settings", "in a file"])
def test_templates_in_files_go_before_those_of_the_settings(
    tmp_path: Path, apart: list[str], has_file: bool
) -> None:
    with_bytes(PLAIN, tmp_path)
    file, directory = tmp_path / "chat_template.jinja", tmp_path / "additional_chat_templates"
    if not has_file:
        file.unlink()
    directory.mkdir()
    for name in apart:
        (directory / f"{name}.jinja").write_text(f"{name} apart")
    named = [{"name": name, "template": f"{name} of the settings"} for name in ("default", "tool_use")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = read_template(tmp_path, read_tokenizer(tmp_path / "tokenizer.json"))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    asked = MessageForm().fields([Message(Role.USER, "a")])
    if not has_file and "default" not in apart:
        assert template is None
        with pytest.raises(ValueError, match="no default"):
            reference.apply_chat_template(asked)
        return
    assert template is not None
    for tools in ([], [tool_fields(TOOL)]):
        shown = reference.apply_chat_template(
            asked, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        assert template.rendered(asked, tools) == shown


def test_a_template_is_told_that_there_are_no_documents(tmp_path: Path) -> None:
    with_bytes("{{ 'none' if documents is none else documents }}", tmp_path)
    template = read_template(tmp_path, read_tokenizer(tmp_path / "tokenizer.json"))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    asked = MessageForm().fields([Message(Role.USER, "a")])
    assert template is not None
    assert template.rendered(asked, []) == reference.apply_chat_template(asked, tokenize=False) == "none"


@pytest.mark.parametrize("config", [{}, {"bos_token": "</s>"}, {"added_tokens_decoder": {}}], ids=str)
def test_tokens_that_an_older_checkpoint_names_apart_are_those_of_transformers(
    tmp_path: Path, config: dict[str, object]
) -> None:
    directory = with_bytes(f"{{{{ bos_token }}}}{PLAIN}", tmp_path)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    named = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}}
    (directory / "special_tokens_map.json").write_text(json.dumps(named))
    chosen = Chosen("old", renderer_for("x", directory), PreTrainedTokenizerFast.from_pretrained(directory))
    asked = [Message(Role.USER, "a")]
    assert chosen.renderer.render(asked, ()) == chosen.reference_ids(asked, [])


def test_what_a_template_cannot_show_is_refused_by_name(case: Case) -> None:
    if case.name != GEMMA.name:
        return
    with pytest.raises(Unrenderable, match="roles must alternate"):
        case.renderer.render([Message(Role.USER, "a"), Message(Role.USER, "b")], ())
    assert case.renderer.bridge([5], [6], [replace(Message(Role.ASSISTANT), content="c")], history=[]) is None


MERGING = """
{%- set ns = namespace(role='') %}
{%- for m in messages %}
{%- if m.role != ns.role %}
{{- ('<|end|>' if ns.role else '') + '<|' + m.role + '|>' }}
{%- endif %}
{%- set ns.role = m.role %}
{{- m.content }}
{%- endfor %}
{{- '<|end|><|assistant|>' }}"""
"""Neighbouring messages of one role are one turn."""


def test_an_answer_that_a_client_adds_to_a_turn_is_not_lost(tmp_path: Path) -> None:
    renderer = renderer_for("x", with_bytes(f"{MERGING}{{# <|user|><|system|><|tool|> #}}", tmp_path))
    asked, answer = Message(Role.USER, "a"), Message(Role.ASSISTANT, "yes")
    added = [Message(Role.ASSISTANT, "and more"), asked]
    ids = renderer.render([asked], ())
    whole = renderer.render([asked, answer, asked], ())
    sampled = whole[len(ids) : whole.index(renderer.stop_token_ids[0], len(ids)) + 1]
    assert renderer.bridge(ids, sampled, [asked], history=[asked, answer]) == whole[len(ids + sampled) :]
    assert renderer.bridge(ids, sampled, added, history=[asked, answer]) is None


NAMING = """
{%- for m in messages %}
{{- '<|' + m.role + '|>' + (m.name + ': ' if m.name else '') + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{{- '<|assistant|>' }}"""


INDEXED = """{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|tool|>Return ' + m.tool_call_id.split(':')[1] + ': ' + m.content + '<|end|>' }}
{%- else %}{{- '<|' + m.role + '|>' + (m.content or '') }}
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>functions.' + c.function.name + ':' + c.id.split(':')[1] }}
{{- '<|tool_call_argument_begin|>' + (c.function.arguments | tojson) + '<|tool_call_end|>' }}{%- endfor %}
{{- '<|tool_calls_section_end|>' }}{%- endif %}{{- '<|end|>' }}{%- endif %}{%- endfor %}
{{- '<|assistant|>' }}"""


def test_calls_keep_the_index_that_the_model_wrote(tmp_path: Path) -> None:
    renderer = renderer_for("x", with_bytes(f"{INDEXED}{{# <|user|><|system|> #}}", tmp_path))
    asked, calling = (
        Message(Role.USER, "a"),
        Message(Role.ASSISTANT, tool_calls=(ToolCall("c", "look", "{}"),)),
    )
    written = [asked, replace(calling, tool_calls=(ToolCall("functions.look:5", "look", "{}"),))]
    ids, whole = renderer.render([asked], ()), renderer.render(written, ())
    sampled = whole[len(ids) : len(whole) - len(renderer.render([], ()))]
    new = Message(Role.TOOL, "done", tool_call_id="c")
    extension = renderer.bridge(ids, sampled, [new], history=[asked, calling])
    assert extension is not None
    assert b"Return 5: done" in b"".join(map(renderer.spelling, extension))


def test_a_result_that_comes_late_has_the_name_of_its_call(tmp_path: Path) -> None:
    renderer = renderer_for("x", with_bytes(f"{NAMING}{{# <|user|><|system|><|tool|> #}}", tmp_path))
    asked, answer = Message(Role.USER, "a"), Message(Role.ASSISTANT, "yes")
    calling = Message(Role.ASSISTANT, tool_calls=(ToolCall("call_0", "bash", "{}"),))
    late = Message(Role.TOOL, "done", tool_call_id="call_0")
    before = [asked, calling, asked]
    ids, whole = renderer.render(before, ()), renderer.render([*before, answer, late], ())
    sampled = whole[len(ids) : whole.index(renderer.stop_token_ids[0], len(ids)) + 1]
    assert renderer.bridge(ids, sampled, [late], history=[*before, answer]) == whole[len(ids + sampled) :]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": "x \\ud83d"}', '{"a": "x ?"}'),
        ('{"a": "\\ud83d\\ude42"}', '{"a": "🙂"}'),
        ("", "{}"),
        ("[" * 100_000, json.dumps("[" * 100_000)),
    ],
    ids=["half a surrogate pair", "a whole one", "nothing", "too deep"],
)
def test_every_text_of_arguments_is_shown(arguments: str, shown: str, tmp_path: Path) -> None:
    renderer = renderer_for("x", with_bytes(f"{NAMING}{{# <|user|><|system|><|tool|> #}}", tmp_path))
    calling = Message(Role.ASSISTANT, tool_calls=(ToolCall("call_0", "bash", arguments),))
    result = Message(Role.TOOL, "done", tool_call_id="call_0")
    ids = renderer.render([Message(Role.USER, "a"), calling, result], ())
    text = b"".join(map(renderer.spelling, ids)).decode()
    assert f'{{"name": "bash", "arguments": {shown}}}' in text


def test_control_tokens_in_arguments_stay_themselves_where_json_is_ascii(tmp_path: Path) -> None:
    template = NAMING.replace("tojson", "tojson(ensure_ascii=True)")
    renderer = renderer_for("x", with_bytes(f"{template}{{# <|user|><|system|><|tool|> #}}", tmp_path))
    arguments = json.dumps({"a": "é🙂\x7f <|end|>"})
    calling = Message(Role.ASSISTANT, tool_calls=(ToolCall("call_0", "bash", arguments),))
    result = Message(Role.TOOL, "done", tool_call_id="call_0")
    ids = renderer.render([Message(Role.USER, "a"), calling, result], ())
    assert f'"arguments": {arguments}}}'.encode() in b"".join(map(renderer.spelling, ids))
    assert ids.count(renderer.stop_token_ids[0]) == 3


def test_a_past_that_is_shown_otherwise_once_it_is_long_is_not_extended(tmp_path: Path) -> None:
    hurried = NAMING.replace(
        "{{- '<|assistant|>' }}",
        "{{- ('<|system|>Hurry.<|end|>' if messages | length > 6) ~ '<|assistant|>' }}",
    )
    renderer = renderer_for("x", with_bytes(f"{hurried}{{# <|user|><|system|><|tool|> #}}", tmp_path))
    asked, answer = Message(Role.USER, "a"), Message(Role.ASSISTANT, "yes")
    stop = renderer.stop_token_ids[0]
    for count, is_extended in ((1, True), (4, False)):
        before = [asked, *[answer, asked] * count]
        ids = renderer.render(before, ())
        bridge = renderer.bridge(ids, [6, stop], [asked], history=[*before, answer])
        assert (bridge is not None) == is_extended
