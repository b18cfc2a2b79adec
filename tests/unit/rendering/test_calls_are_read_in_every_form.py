"""The form of calls is found by how a template writes one; each is read back, and what is none stays text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polar.errors import InvalidInput
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.call_forms import form_named
from polar.rendering.families import renderer_for
from polar.rendering.template_renderer import TemplateRenderer
from tests.tokenizers_of_families import with_bytes
from tests.turns import read_turn

TEMPLATE = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|stop|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}"
    "{{ '\n' + m.content }}{% if m.tool_calls %}CALLS{% endif %}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
EACH = "{% for c in m.tool_calls %}EACH{% endfor %}"
FORMS = {
    "hermes": EACH.replace("EACH", "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"),
    "xml": EACH.replace(
        "EACH",
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    ),
    "glm": EACH.replace(
        "EACH",
        "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    ),
    "deepseek": "<｜tool▁calls▁begin｜>"
    + EACH.replace(
        "EACH",
        "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}"
        "<｜tool▁call▁end｜>",
    )
    + "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|>"
    + EACH.replace(
        "EACH",
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
        "<|tool_call_end|>",
    )
    + "<|tool_calls_section_end|>",
    "mistral": EACH.replace(
        "EACH",
        "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
    ),
    "json": "<|tool_call|>["
    + EACH.replace("EACH", "{{ c.function | tojson }}{% if not loop.last %}, {% endif %}")
    + "]<|/tool_call|>",
    "pythonic": "<|call|>["
    + EACH.replace(
        "EACH",
        "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}",
    )
    + "]",
}
TOOL = ToolDefinition(
    "look",
    "",
    {"type": "object", "properties": {"at": {"type": "string"}, "deep": {"type": "boolean"}, "n": {}}},
)


def rendered(calls: str, directory: Path) -> TemplateRenderer:
    renderer = renderer_for("x", with_bytes(TEMPLATE.replace("CALLS", calls), directory))
    assert isinstance(renderer, TemplateRenderer)
    return renderer


def read(renderer: TemplateRenderer, text: str) -> Message:
    return read_turn(renderer.parser((TOOL,)), renderer.tokens.ids(text))


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_found_and_its_calls_are_read_back(form: str, tmp_path: Path) -> None:
    renderer = rendered(FORMS[form], tmp_path)
    assert renderer.call_form == form
    calls = (
        ToolCall("call_0", "look", '{"at": "12", "deep": true, "n": 3}'),
        ToolCall("call_1", "look", '{"at": "b"}'),
    )
    turn = Message(Role.ASSISTANT, "", tool_calls=calls)
    asked = [Message(Role.USER, "a")]
    prompt, whole = renderer.text(asked, (TOOL,)), renderer.text([*asked, turn], (TOOL,))
    assert whole.startswith(prompt)
    nameless = tuple(replace(call, id="") for call in calls)
    assert read(renderer, whole[len(prompt) :]) == replace(turn, tool_calls=nameless)


@pytest.mark.parametrize("form", FORMS)
def test_half_a_call_stays_content(form: str, tmp_path: Path) -> None:
    renderer = rendered(FORMS[form], tmp_path)
    assert renderer.calls is not None
    text = f"{renderer.calls.opening}{{oops"
    assert read(renderer, text) == Message(Role.ASSISTANT, text)


@pytest.mark.parametrize("form", ["kimi", "mistral"])
def test_results_name_the_call_as_the_model_wrote_it(form: str, tmp_path: Path) -> None:
    renderer = rendered(FORMS[form], tmp_path)
    written = {
        "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:7"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "mistral": "[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{}",
    }[form]
    id = {"kimi": "functions.look:7", "mistral": "a1b2c3d4e"}[form]
    turn = Message(Role.ASSISTANT, tool_calls=(ToolCall("ours", "look", "{}"),))
    sampled = renderer.tokens.ids(f"{written}<|stop|>")
    history = [Message(Role.USER, "a"), turn]
    bridge = renderer.bridge([5], sampled, [Message(Role.TOOL, "b", tool_call_id="ours")], history=history)
    assert bridge is not None
    assert b"".join(map(renderer.spelling, bridge)).startswith(f"<|start|>tool {id}\nb<|stop|>".encode())


FENCED = '```json\n{\n  "name": "look",\n  "arguments": {"at": "a ```json {} ``` b"}\n}\n```'


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_json_in_markdown_is_a_call_where_it_is_asked_for_and_names_a_tool(step: int, tmp_path: Path) -> None:
    directory = with_bytes(TEMPLATE.replace("CALLS", FORMS["hermes"]), tmp_path)
    renderer = renderer_for("x", directory, tool_form="fenced")
    assert isinstance(renderer, TemplateRenderer)

    def said(text: str) -> Message:
        ids = renderer.tokens.ids(text)
        return read_turn(renderer.parser((TOOL,)), *(ids[at : at + step] for at in range(0, len(ids), step)))

    called = ToolCall("", "look", '{"at": "a ```json {} ``` b"}')
    assert said(FENCED) == Message(Role.ASSISTANT, tool_calls=(called,))
    assert said(f"I will look.\n{FENCED}").content == "I will look."
    assert len(said(f"{FENCED}\n{FENCED}").tool_calls) == 2
    tagged = '<tool_call>{"name": "look", "arguments": {"at": "b"}}</tool_call>'
    assert said(tagged).tool_calls == (ToolCall("", "look", '{"at": "b"}'),)
    for text in (FENCED.replace("look", "sort"), "```python\nx = {}\n```", "```json\n[1]\n```", "```json"):
        assert said(text) == Message(Role.ASSISTANT, text)


LOOK_A, LOOK_B = (json.dumps({"name": "look", "arguments": {"at": place}}) for place in "ab")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            '<tool_call>{"name": "look", "arguments": {"at": "```json\\n{}\\n```"}}</tool_call>',
            ["```json\n{}\n```"],
        ),
        (
            f'<tool_call>{{"name": "look", "arguments": {{"at": "```json", "b": {LOOK_B}}}}}</tool_call>',
            ["```json"],
        ),
        (f"```json\n[{LOOK_A}, {LOOK_B}]\n```", ["a", "b"]),
        (f"```json\n{LOOK_A}}}\n{LOOK_B}\n```", ["a", "b"]),
        (f"```json\n{LOOK_A}\n```\n<tool_call>{LOOK_B}</tool_call>", ["a", "b"]),
        (f"<tool_call>{LOOK_A}</tool_call>\n```json\n{LOOK_B}\n```", ["a", "b"]),
        (f"```json\n[1]\n```\nand not {LOOK_A}", []),
        (f"```json\nsee below\n```\nand not {LOOK_A}", []),
    ],
)
def test_calls_in_tags_and_in_markdown_are_those_that_stand_there(
    text: str, arguments: list[str], tmp_path: Path
) -> None:
    directory = with_bytes(TEMPLATE.replace("CALLS", FORMS["hermes"]), tmp_path)
    renderer = renderer_for("x", directory, tool_form="fenced")
    assert isinstance(renderer, TemplateRenderer)
    read = read_turn(renderer.parser((TOOL,)), renderer.tokens.ids(text))
    assert [json.loads(call.arguments)["at"] for call in read.tool_calls] == arguments
    assert read.content == ("" if arguments else text)


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        (LOOK_A, ["a"], ""),
        (f"{LOOK_A}\n{LOOK_B}", ["a", "b"], ""),
        (f"[{LOOK_A}, {LOOK_B}]", ["a", "b"], ""),
        (f"\n{LOOK_A}}}\n", ["a"], ""),
        (LOOK_A.replace("look", "sort"), [], None),
        (f"{LOOK_A} is what I would call", [], None),
        (f"{LOOK_A}\n{LOOK_B.replace('look', 'sort')}", [], None),
        (f"I would call {LOOK_A}", [], None),
        ('{"at": "a"}', [], None),
        (LOOK_A[:-1], [], None),
        (f'{{"at": "a"}} means:\n```json\n{LOOK_B}\n```', ["b"], '{"at": "a"} means:'),
        (f"[As told]\n<tool_call>{LOOK_B}</tool_call>", ["b"], "[As told]"),
    ],
)
def test_a_turn_of_bare_json_calls_where_that_is_asked_for_and_is_all_it_says(
    text: str, arguments: list[str], content: str | None, step: int, tmp_path: Path
) -> None:
    directory = with_bytes(TEMPLATE.replace("CALLS", FORMS["hermes"]), tmp_path)
    renderer = renderer_for("x", directory, tool_form="fenced")
    assert isinstance(renderer, TemplateRenderer)
    ids = renderer.tokens.ids(text)
    pieces = (ids[at : at + step] for at in range(0, len(ids), step))
    read = read_turn(renderer.parser((TOOL,)), *pieces)
    assert [json.loads(call.arguments)["at"] for call in read.tool_calls] == arguments
    assert read.content == (text if content is None else content)


def test_a_form_may_be_named_where_the_template_writes_none(tmp_path: Path) -> None:
    directory = with_bytes(TEMPLATE.replace("CALLS", ""), tmp_path)
    with pytest.raises(InvalidInput, match="shows tools and no calls"):
        renderer_for("x", directory)
    renderer = renderer_for("x", directory, tool_form="hermes")
    assert isinstance(renderer, TemplateRenderer)
    assert read(renderer, '<tool_call>{"name": "look"}</tool_call>').tool_calls[0].name == "look"
    with pytest.raises(InvalidInput, match=r"engine\.tool_form: there is no yaml"):
        renderer_for("x", directory, tool_form="yaml")


@pytest.mark.parametrize("name", [*FORMS])
def test_a_call_that_an_argument_spells_is_none(name: str, tmp_path: Path) -> None:
    if name in ("xml", "glm"):
        return  # they write values as they are, and have no way to tell
    renderer = rendered(FORMS[name], tmp_path)
    inner, outer = (
        ToolCall("call_0", "look", json.dumps({"at": at}, ensure_ascii=False)) for at in ("x", "AT")
    )
    prompt = [Message(Role.USER, "u")]
    ids = [
        renderer.text([*prompt, Message(Role.ASSISTANT, "", tool_calls=(call,))], (TOOL,))
        for call in (inner, outer)
    ]
    start = len(renderer.text(prompt, (TOOL,)))
    turn, whole = (text[start : text.index("<|stop|>", start)] for text in ids)
    spelt = whole.replace("AT", json.dumps(turn, ensure_ascii=False)[1:-1])
    assert [json.loads(call.arguments) for call in read(renderer, spelt).tool_calls] == [{"at": turn}]


@pytest.mark.parametrize("value", ["{1, 2}", "b'a'", "...", "1j", "{(1, 2): 3}", "{[1]: 2}"])
def test_python_that_is_no_json_stays_text(value: str, tmp_path: Path) -> None:
    text = f"<|call|>[look(at={value})]"
    said = read(rendered(FORMS["pythonic"], tmp_path), text)
    assert (said.content, said.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("pythonic", r'<|call|>[look(n="\ud83d")]', '{"n": "?"}'),
        (
            "glm",
            r'<tool_call>look<arg_key>n</arg_key><arg_value>"\ud83d"</arg_value></tool_call>',
            '{"n": "?"}',
        ),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"at": "a\nb"}', r'{"at": "a\nb"}'),
    ],
)
def test_arguments_are_json_to_everyone(name: str, text: str, arguments: str, tmp_path: Path) -> None:
    (call,) = read(rendered(FORMS[name], tmp_path), text).tool_calls
    assert call.arguments == arguments


def test_a_second_call_is_not_read_where_a_template_can_show_only_one(tmp_path: Path) -> None:
    only_one = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    renderer = rendered(only_one + FORMS["json"], tmp_path)
    calls = [{"name": "look", "arguments": {"at": at}} for at in "ab"]
    text = f"<|tool_call|>{json.dumps(calls)}<|/tool_call|><|stop|>"
    turn, asked = read(renderer, text), Message(Role.USER, "u")
    assert [call.arguments for call in turn.tool_calls] == ['{"at": "a"}']
    result = Message(Role.TOOL, "seen", tool_call_id=turn.tool_calls[0].id)
    ids = renderer.render([asked], (TOOL,)), renderer.tokens.ids(text)
    assert renderer.bridge(*ids, [result], history=[asked, turn], tools=(TOOL,)) is not None


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("gemma", '<|tool_call>call:look{at:<|"|>a, b: {"c"}<|"|>,n:[1,{x:null}]}<tool_call|>', None),
        ("gemma", "<|tool_call>call:look{}<tool_call|>", {}),
        ("gemma", '<|tool_call>call:look{at:<|"|>a', "text"),
        (
            "dsml",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
            '<｜DSML｜parameter name="at" string="true">'
            'a, b: {"c"}</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">[1, {"x": null}]'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            None,
        ),
    ],
)
def test_values_are_what_the_form_says(form: str, text: str, arguments: object) -> None:
    found = form_named(form, "")
    assert found is not None
    calls = found.calls(text, (TOOL,))
    if arguments == "text":
        assert calls == ()
        return
    assert [call.name for call in calls] == ["look"]
    expected = {"at": 'a, b: {"c"}', "n": [1, {"x": None}]} if arguments is None else arguments
    assert json.loads(calls[0].arguments) == expected
