"""The forms of calls of model families, and which one a template uses.

Only `hermes` is parsed while streaming. In the others, text after the opening is held until the turn ends and
then parsed as a whole; if that fails, it stays content.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from polar.models.chat import ToolCall, ToolDefinition
from polar.rendering.base import MessageDelta
from polar.rendering.tool_calls import OPEN, CallReader, call_of, calls_in, overlap, strict_json

Types = Mapping[str, Mapping[str, Any]]
"""Function → parameter → its JSON schema."""
HERMES = "hermes"
FENCED = "fenced"
HARMONY = "harmony"
FORM_NAMES = (
    *(HERMES, FENCED, "xml", "glm", "deepseek", "dsml", "kimi", "mistral", HARMONY, "gemma"),
    *("json", "pythonic"),
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of calls."""

    name: str
    opening: str
    """The text that begins the first call; empty if a turn with calls contains nothing else."""
    read: Callable[[str, Types], Iterator[ToolCall]]
    """Parse the calls in a text, with the ids in it; raise ValueError if that fails."""
    other_opening: str = ""
    """An alternative to the opening."""
    reads_bare: bool = False
    """Whether a turn of nothing but JSON calls too, without an opening."""

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening, self.other_opening)))

    def calls(self, text: str, tools: Sequence[ToolDefinition]) -> tuple[ToolCall, ...]:
        """The calls of a turn from its opening; empty if unreadable."""
        types = {tool.name: tool.parameters.get("properties") or {} for tool in tools}
        try:
            return tuple(self.read(text, types))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return ()

    def reader(self, tools: Sequence[ToolDefinition]) -> CallReader | HeldCalls:
        return CallReader() if self.name == HERMES else HeldCalls(self, tools)


class HeldCalls:
    """Splits text into content and calls; calls come at the end of the turn."""

    def __init__(self, form: CallForm, tools: Sequence[ToolDefinition]) -> None:
        self._form = form
        self._tools = tools
        self._buffer = ""
        self._is_held = False
        self._has_text = False

    def feed(self, text: str) -> MessageDelta:
        self._buffer += text
        if self._is_held:
            return MessageDelta()
        start = self._opening()
        self._is_held = start is not None
        if start is None:
            openings = self._form.openings
            start = len(self._buffer) - max((overlap(self._buffer, each) for each in openings), default=0)
        # White space may stand before a call that does not show yet.
        shown = self._buffer[:start].rstrip()
        self._buffer = self._buffer[len(shown) :]
        self._has_text = self._has_text or bool(shown)
        return MessageDelta(shown)

    def finish(self) -> MessageDelta:
        # What began as bare JSON may be none of calls, and be followed by some.
        starts = dict.fromkeys((0, self._mark() or 0)) if self._is_held else ()
        text, self._buffer = self._buffer, ""
        for start in starts:
            if calls := self._form.calls(text[start:].lstrip(), self._tools):
                nameless = tuple(replace(call, id="") for call in calls)
                return MessageDelta(text[:start].rstrip(), tool_calls=nameless)
        return MessageDelta(text)

    def _opening(self) -> int | None:
        """Position where calls may begin."""
        may_be_bare = self._form.reads_bare or not self._form.openings
        if may_be_bare and not self._has_text and self._buffer.lstrip()[:1] in tuple("{["):
            return 0
        return self._mark()

    def _mark(self) -> int | None:
        """Position of the first opening."""
        found = (self._buffer.find(opening) for opening in self._form.openings)
        return min((start for start in found if start >= 0), default=None)


def form_of(turn: str, calls: Sequence[ToolCall], tools: Sequence[ToolDefinition]) -> CallForm | None:
    """The form that a template used for these calls, and nothing else, in a turn. Never `fenced`, which some
    models use whatever their template shows."""
    forms = (form for form in _forms(turn) if form.name != FENCED)
    return next((form for form in forms if _reads_back(form, turn, calls, tools)), None)


def form_named(name: str, turn: str) -> CallForm | None:
    """The form of this name, with the opening that a turn of calls has where it is not the form's own."""
    return next((form for form in _forms(turn) if form.name == name), None)


def _forms(turn: str) -> Iterator[CallForm]:
    yield CallForm(HERMES, OPEN, _hermes)
    yield CallForm(FENCED, OPEN, _fenced, _FENCE, reads_bare=True)
    yield CallForm("xml", OPEN, _xml)
    yield CallForm("glm", OPEN, _glm)
    for name, (opening, head) in _HEADS.items():
        yield CallForm(name, opening, partial(_headed, head))
    yield CallForm("dsml", "<｜DSML｜", _dsml)
    yield CallForm("gemma", "<|tool_call>", _gemma)
    yield CallForm("json", _before(r"\[?\s*\{", turn), _json)
    yield CallForm("pythonic", _before(r"\[\w[\w.]*\(", turn), _pythonic)


def _before(calls: str, turn: str) -> str:
    found = re.search(calls, turn)
    return turn[: found.start()].strip() if found else ""


def _reads_back(
    form: CallForm, turn: str, calls: Sequence[ToolCall], tools: Sequence[ToolDefinition]
) -> bool:
    reader = form.reader(tools)
    read = (*reader.feed(turn.strip()).tool_calls, *reader.finish().tool_calls)
    return [(call.name, json.loads(call.arguments)) for call in read] == [
        (call.name, json.loads(call.arguments)) for call in calls
    ]


def _hermes(text: str, types: Types) -> Iterator[ToolCall]:
    reader = CallReader()
    yield from reader.feed(text).tool_calls


_FENCE = "```json"
_OPENINGS = re.compile(f"{OPEN}|{_FENCE}")
_STRAY = re.compile(r"[\s,}\]]*")
"""Text tolerated between and after calls: small models miscount brackets."""
_VALUE = re.compile(rf"{_STRAY.pattern}(?=[{{\[])")
"""Text tolerated before an object or a list."""


def _fenced(text: str, types: Types) -> Iterator[ToolCall]:
    """Calls in the tags of Hermes, or as JSON in Markdown or alone, if they name an offered function.

    Qwen2.5-Coder is shown the tags by its template, but was hardly trained on them.
    """
    if _OPENINGS.match(text) is None:
        yield from _bare(text, types)
        return
    place = 0
    while opening := _OPENINGS.search(text, place):
        is_fence = opening[0].startswith(_FENCE)
        place = opening.end()
        while more := _VALUE.match(text, place):
            try:
                _, end = json.JSONDecoder(strict=False).raw_decode(text, more.end())
            except ValueError:
                end = more.end()
            body = text[more.end() : end]
            calls = _offered(body, types) if is_fence else calls_in(body)
            yield from (replace(call, id="") for call in calls)
            # After the call, since its arguments may look like one.
            place = end
            if not is_fence:
                break
        if is_fence and place == opening.end():
            raise ValueError("not a call")


def _bare(text: str, types: Types) -> Iterator[ToolCall]:
    """Calls as bare JSON, one after another."""
    place = 0
    while more := _VALUE.match(text, place):
        _, place = json.JSONDecoder(strict=False).raw_decode(text, more.end())
        yield from (replace(call, id="") for call in _offered(text[more.end() : place], types))
    if _STRAY.fullmatch(text, place) is None:
        raise ValueError("it is more than calls")


def _offered(body: str, types: Types) -> list[ToolCall]:
    """The calls in a JSON object or list; ValueError if it is anything else."""
    calls = calls_in(body)
    if not calls or any(call.name not in types for call in calls):
        raise ValueError("not a call to an offered function")
    return calls


def _xml(text: str, types: Types) -> Iterator[ToolCall]:
    """Qwen3-Coder: `<function=name>`, then `<parameter=name>` for each."""
    for function in re.finditer(r"<function=([^>\n]+)>(.*?)</function>", text, re.DOTALL):
        given = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
        yield _typed_call(function[1].strip(), given, types)


def _glm(text: str, types: Types) -> Iterator[ToolCall]:
    """GLM-4.5: the name, then `<arg_key>` and `<arg_value>` for each parameter."""
    for call in re.finditer(r"<tool_call>\s*([^\s<{]+)(.*?)</tool_call>", text, re.DOTALL):
        pattern = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
        yield _typed_call(call[1], re.findall(pattern, call[2], re.DOTALL), types)


def _dsml(text: str, types: Types) -> Iterator[ToolCall]:
    """DeepSeek V3.2: `invoke` and `parameter`, which states whether its value is text."""
    for call in re.finditer(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', text, re.DOTALL):
        pattern = r'<｜DSML｜parameter name="([^"]+)" string="(\w+)">(.*?)</｜DSML｜parameter>'
        given = re.findall(pattern, call[2], re.DOTALL)
        values = {key: said if kind == "true" else json.loads(said) for key, kind, said in given}
        yield ToolCall("", call[1], _written(values))


def _typed_call(name: str, given: Sequence[tuple[str, str]], types: Types) -> ToolCall:
    """A call with textual values, typed by the tool's parameters."""
    declared = types.get(name, {})
    values = {key: _value(text, declared.get(key)) for key, text in given}
    return ToolCall("", name, _written(values))


def _written(values: dict[str, Any]) -> str:
    # A lone surrogate is legal in escapes but is no text.
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace").decode()


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(_PYTHON_WORDS.get(text, text))
    except ValueError:
        return text


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS = {"true": True, "false": False, "null": None}
_HEADS = {
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+?)(?:<｜tool▁sep｜>|\n```json\n)",
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d+)\s*"
        r"<\|tool_call_argument_begin\|>\s*",
    ),
    "mistral": (
        "[TOOL_CALLS]",
        r"\[TOOL_CALLS\](?P<name>[^\s\[{]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]",
    ),
    HARMONY: (
        "to=functions.",
        r"to=functions\.(?P<name>[^\s<]+)(?:[^<]|<\|(?!message)\w+\|>)*<\|message\|>\s*",
    ),
}
"""Form → its opening, and what stands before the JSON of a call's arguments."""


def _headed(head: str, text: str, types: Types) -> Iterator[ToolCall]:
    heads = re.compile(head)
    found = heads.search(text)
    while found:
        arguments, end = json.JSONDecoder(strict=False).raw_decode(text, found.end())
        if not isinstance(arguments, dict):
            raise ValueError("arguments must be an object")
        named = found.groupdict()
        yield ToolCall(named.get("id") or "", named["name"], strict_json(text[found.end() : end], arguments))
        # After the arguments, since they may look like a call.
        found = heads.search(text, end)


_QUOTE = '<|"|>'
_KEY = re.compile(r'(?<=[{,])\s*([^\s{}\[\],:"]+)\s*:')


def _gemma(text: str, types: Types) -> Iterator[ToolCall]:
    """Gemma 4: JSON with bare keys, and strings between control tokens."""
    for call in re.finditer(r"<\|tool_call>call:([^\s{]+)(?=\{)", text):
        parts = text[call.end() :].split(_QUOTE)
        parts[::2] = [_KEY.sub(r'"\1":', part) for part in parts[::2]]
        parts[1::2] = map(json.dumps, parts[1::2])
        values, _ = json.JSONDecoder().raw_decode("".join(parts))
        yield ToolCall("", call[1], _written(values))


def _json(text: str, types: Types) -> Iterator[ToolCall]:
    """JSON that names function and arguments, alone or in a list, as in Llama 3 and Mistral."""
    decoder = json.JSONDecoder(strict=False)
    place = text.find("{")
    while place >= 0:
        _, end = decoder.raw_decode(text, place)
        yield call_of(text[place:end])
        place = text.find("{", end)


def _pythonic(text: str, types: Types) -> Iterator[ToolCall]:
    """A list of Python calls with keyword arguments, as in Llama 4 and LFM2."""
    listed = re.search(r"\[.*\]", text, re.DOTALL)
    calls = _JsonWords().visit(ast.parse(listed[0] if listed else text, mode="eval")).body
    for call in calls.elts if isinstance(calls, ast.List) else [calls]:
        if not isinstance(call, ast.Call) or call.args or any(not each.arg for each in call.keywords):
            raise ValueError("not a call")
        values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        yield ToolCall("", ast.unparse(call.func), _written(values))


class _JsonWords(ast.NodeTransformer):
    """Inside lists and objects some templates write JSON's words."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node
