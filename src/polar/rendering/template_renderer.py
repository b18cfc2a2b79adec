"""A renderer made from a model's chat template alone.

What follows a sampled turn is found by rendering around it: the template shows a stand-in for the turn and
the new messages, and what it writes from the control token on that ends the turn is what comes after the
sampled ids. They themselves are never rendered. Where the template shows a conversation's past in another way
once there are new messages (it drops thoughts, or moves the tools), the conversation is not extended.

What of this holds for a template is proved on probe conversations before it is used (`template_proof`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Any

from tokenizers import Tokenizer

from polar.models.chat import Message, Role, ToolChoice, ToolDefinition
from polar.rendering.base import IdSequence, Renderer, ResponseParser, Thinking, TurnForm, Unrenderable
from polar.rendering.call_forms import HARMONY, HERMES, CallForm
from polar.rendering.template import ChatTemplate, MessageForm, tool_fields
from polar.rendering.tokenizer import RawText, TemplateText, TextStream, Vocabulary
from polar.rendering.tool_calls import limited
from polar.rendering.tool_prompt import ToolsInText
from polar.rendering.turn_parser import ChannelParser, TurnMarks, TurnParser

TEMPLATE = "template"
ASKED = Message(Role.USER, "u")
MARK, THOUGHT_MARK = f"m{token_hex(12)}", f"t{token_hex(12)}"
"""Unguessable placeholders for a turn's text and its thoughts."""
_MARKED = json.dumps({MARK: MARK})
"""The arguments of a placeholder turn's calls."""
_OPENING = 16
"""Number of final prompt ids in which an opened thought is looked for."""
_HIDING = [chr(0xFDD0 + n) for n in range(32)]
"""Characters that occur in no text."""


class TemplateRenderer(Renderer):
    """Renders as the template shows; its proof sets the attributes."""

    def __init__(
        self, template: ChatTemplate, form: MessageForm, tokenizer: Tokenizer, *, keeps_thoughts: bool
    ) -> None:
        self._template = template
        self._form = form
        self._tokenizer = tokenizer
        self._keeps_thoughts = keeps_thoughts
        # From here on no text spells a control token: they are looked up.
        tokenizer.encode_special_tokens = True
        self.tokens = TemplateText(tokenizer)
        self.raw = RawText(tokenizer)
        self._shown_tools: tuple[Sequence[ToolDefinition], list[dict[str, Any]], bool] = ((), [], False)
        """The last tools, their fields, and whether they spell a control token."""
        self.thinking: Thinking | None = None
        self.think_mark = ""
        """Opening mark of thoughts, in prompt or turn."""
        self.calls: CallForm | None = None
        self.has_one_call = False
        """Whether a turn has at most one call."""
        self.shows_ids = True
        """Whether call ids are shown."""
        self.call_marks: frozenset[str] = frozenset()
        """Control tokens in calls."""
        self.says_last = False
        """Whether the text of a turn with calls is shown only after the results."""
        self.tools_in_text: ToolsInText | None = None
        """Rewrites conversations if the template knows no tools."""
        self.is_plain = False
        self.keeps_space = False
        """Whether white space around an answer is shown."""
        self.rewriting: set[tuple[Role, bool, bool]] = set()
        """Roles of new messages that may rewrite history, by whether the turn, and the history, has
        thoughts."""
        self.extends = keeps_thoughts
        """Whether some turns remain as sampled."""
        self.far_reaching: set[Role] = set()
        """Roles of new messages whose form depends on more than the previous turn."""
        self._stops: tuple[int, ...] = ()
        self.know_marks(())

    def know_marks(self, ends: Iterable[int]) -> None:
        """Record the ids that end turns, once thoughts and calls are known."""
        self._stops = tuple(dict.fromkeys(ends))
        inside = [*self.call_marks]
        if self.thinking is not None:
            inside += self.tokens.control.findall(self.think_mark + self.thinking.end)
        self._vocabulary = Vocabulary(self._tokenizer, inside)
        end = self.thinking.end.strip() if self.thinking is not None else ""
        stops = frozenset(self._stops)
        self._marks = TurnMarks(self._vocabulary, stops, self.think_mark, end, self.calls, self.keeps_space)

    def hide_text_behind_thoughts(self) -> None:
        self._form = replace(self._form, hides_text=True)

    @property
    def name(self) -> str:
        is_ours = self.tools_in_text is not None and self.tools_in_text.describes
        return f"{TEMPLATE}+tool_prompt" if is_ours else TEMPLATE

    @property
    def call_form(self) -> str | None:
        return self.calls.name if self.calls else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    @property
    def form(self) -> TurnForm:
        writes_calls = self.calls is not None and self.calls.name == HERMES
        return TurnForm(self.is_plain, writes_calls, self.thinking)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]:
        return self.tokens.ids(*self._text(messages, tools))

    def bridge(
        self,
        prompt_ids: IdSequence,
        sampled_ids: IdSequence,
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] = (),
        tools: Sequence[ToolDefinition] = (),
    ) -> list[int] | None:
        if not history:
            return None
        sampled = self._sampled_text(sampled_ids)
        turn, new = self._with_written_ids(history[-1], new_messages, sampled)
        before = history[:-1]
        try:
            if self._goes_on(turn, new) or not self._stays(before, turn, sampled, new, tools):
                return None
            text, hiding = (
                self.after((ASKED,), turn, new, ())
                if self._is_near(turn, new)
                else self.after(before, turn, new, tools)
            )
        except Unrenderable:
            return None
        ids = self.tokens.ids(text, hiding)
        if len(sampled_ids) and sampled_ids[-1] == ids[0]:
            return ids[1:]
        if ids[0] not in self._stops:
            # The model ends its last message with another token than the template shows it with afterwards.
            return self._after_other_end(sampled_ids, ids)
        return self._unfinished_thought(turn, sampled) + ids

    def _after_other_end(self, sampled_ids: IdSequence, ids: list[int]) -> list[int] | None:
        if not len(sampled_ids) or sampled_ids[-1] not in self._stops:
            return ids
        return ids[1:] if self._keeps_thoughts else None

    def opened(self, text: str) -> list[int] | None:
        thinks_already = self.thinking is not None and not self.thinking.begin
        if not self.is_plain or thinks_already:
            return None
        hiding = _free_mark(text)
        return self.tokens.ids(self._hide(text, hiding), hiding)

    def spelling(self, id: int) -> bytes:
        return self._vocabulary.spelling(id)

    def parser(
        self, tools: Sequence[ToolDefinition] = (), prompt_ids: IdSequence | None = None
    ) -> ResponseParser:
        if self.call_form == HARMONY:
            return ChannelParser(self._marks, tools)
        thinking = self.thinking
        has_begun = thinking is not None and not thinking.begin
        if thinking is not None and prompt_ids is not None:
            end = b"".join(map(self.spelling, map(int, prompt_ids[-_OPENING:])))
            has_begun = end.rstrip().endswith(self.think_mark.encode())
        # A second call could not be shown again.
        choice = ToolChoice(parallel=not self.has_one_call)
        return limited(TurnParser(self._marks, tools, has_begun=has_begun), choice)

    def after(
        self,
        before: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        tools: Sequence[ToolDefinition],
    ) -> tuple[str, str]:
        """The template's text after a turn's end, and the characters that hide control tokens in it."""
        text, hiding = self._text([*before, self.stand_in(turn), *new], tools)
        return text[self._end_of_turn(text) :], hiding

    def stand_in(self, turn: Message) -> Message:
        """A placeholder turn with the same parts."""
        calls = tuple(replace(call, arguments=_MARKED) for call in turn.tool_calls)
        says = not calls or (bool(turn.content) and not self.says_last)
        return Message(Role.ASSISTANT, MARK if says else "", THOUGHT_MARK if turn.reasoning else None, calls)

    def shows_alike(
        self,
        before: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        tools: Sequence[ToolDefinition],
        *,
        has_thoughts: bool,
    ) -> bool:
        """Whether history is shown as it was when the turn was sampled."""
        prompt, _ = self._text(before, tools)
        whole, _ = self._text([*before, self.stand_in(turn), *new], tools)
        shown = whole[len(prompt) : self._end_of_turn(whole)]
        if self.thinking is None:
            return whole.startswith(prompt)
        is_thought_shown = not turn.reasoning or THOUGHT_MARK in shown
        is_end_shown = not has_thoughts or self.thinking.end.strip() in shown
        return whole.startswith(prompt) and is_thought_shown and is_end_shown

    def _stays(
        self,
        before: Sequence[Message],
        turn: Message,
        sampled: str,
        new: Sequence[Message],
        tools: Sequence[ToolDefinition],
    ) -> bool:
        """Whether new messages keep history unchanged, or should."""
        if self._keeps_thoughts:
            return True
        thinking = self.thinking
        thought = thinking is not None and (bool(turn.reasoning) or thinking.end.strip() in sampled)
        earlier = thinking is not None and any(message.reasoning for message in before)
        if self.rewriting.isdisjoint((message.role, thought, earlier) for message in new):
            return True
        return self.shows_alike(before, turn, new, tools, has_thoughts=thought)

    def _goes_on(self, turn: Message, new: Sequence[Message]) -> bool:
        """Whether new messages continue the turn itself, before its end."""
        if not new or goes_with(turn, new):
            return False  # as the proof has seen
        alone, followed = (self.text([ASKED, self.stand_in(turn), *said]) for said in ((), new))
        ends = (text[text.rfind(MARK) : self._end_of_turn(text)] for text in (alone, followed))
        return next(ends) != next(ends)

    def _is_near(self, turn: Message, new: Sequence[Message]) -> bool:
        """Whether new messages do not depend on history before the turn, unlike late results."""
        calls = {call.id for call in turn.tool_calls}
        return all(
            message.role not in self.far_reaching and message.tool_call_id in (None, *calls)
            for message in new
        )

    def _end_of_turn(self, text: str) -> int:
        """Position of the end-of-turn token of the placeholder turn."""
        place = text.rfind(MARK)
        found = self.tokens.control.finditer(text, place) if place >= 0 else ()
        end = next((match.start() for match in found if match[0] not in self.call_marks), None)
        if end is None:
            raise Unrenderable("no control token ends a turn in this model's template")
        return end

    def _sampled_text(self, ids: IdSequence) -> str:
        """The sampled text, as far as needed: thoughts may be cut short, and some calls have ids."""
        is_needed = self.thinking is not None or (self.calls is not None and self.shows_ids)
        return TextStream(self._vocabulary).feed(map(int, ids)) if is_needed else ""

    def _with_written_ids(
        self, turn: Message, new: Sequence[Message], sampled: str
    ) -> tuple[Message, Sequence[Message]]:
        """Replace ids by those that the model wrote, if its form has any."""
        if self.calls is None or not turn.tool_calls or not self.shows_ids:
            return turn, new
        written = self.calls.calls(sampled[max(sampled.find(self.calls.opening), 0) :], ())
        ids = {call.id: found.id for call, found in zip(turn.tool_calls, written, strict=False) if found.id}
        if not ids:
            return turn, new
        calls = tuple(replace(call, id=ids.get(call.id, call.id)) for call in turn.tool_calls)
        answers = [
            replace(message, tool_call_id=ids.get(message.tool_call_id, message.tool_call_id))
            if message.tool_call_id
            else message
            for message in new
        ]
        return replace(turn, tool_calls=calls), answers

    def _unfinished_thought(self, turn: Message, sampled: str) -> list[int]:
        """Closing mark of thoughts that were cut short."""
        if self.thinking is None or not turn.reasoning or self.thinking.end.strip() in sampled:
            return []
        return self.tokens.ids(self.thinking.end.rstrip())

    def call_ids(self, messages: Sequence[Message]) -> list[str]:
        """The ids of all calls in the template's form."""
        return [call["id"] for fields in self._form.fields(messages) for call in fields.get("tool_calls", ())]

    def text(self, messages: Sequence[Message], tools: Sequence[ToolDefinition] = ()) -> str:
        return self._text(messages, tools)[0]

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> tuple[str, str]:
        """The rendered text, and the character that hides each spelled control token."""
        if self.tools_in_text is not None:
            messages, tools = self.tools_in_text.rewritten(messages, tools), ()
        fields, (shown_tools, tools_spell) = self._form.fields(messages), self._fields_of(tools)
        if not tools_spell and not self._spells_control(fields):
            return self._template.rendered(fields, shown_tools), ""
        hiding = _free_mark([fields, shown_tools])
        return self._template.rendered(self._hide(fields, hiding), self._hide(shown_tools, hiding)), hiding

    def _fields_of(self, tools: Sequence[ToolDefinition]) -> tuple[list[dict[str, Any]], bool]:
        """Tool fields, cached as a session always offers the same."""
        known, fields, spell = self._shown_tools
        if known is not tools:
            fields = [tool_fields(tool) for tool in tools]
            spell = self._spells_control(fields)
            self._shown_tools = tools, fields, spell
        return fields, spell

    def _spells_control(self, said: Any) -> bool:
        return any(map(self.tokens.control.search, _texts(said)))

    def _hide(self, value: Any, hiding: str) -> Any:
        match value:
            case str():
                return self.tokens.control.sub(lambda match: match[0][0] + hiding + match[0][1:], value)
            case dict():
                return {self._hide(key, hiding): self._hide(each, hiding) for key, each in value.items()}
            case list():
                return [self._hide(each, hiding) for each in value]
            case _:
                return value


def goes_with(turn: Message, new: Sequence[Message]) -> bool:
    """Whether new messages fit the turn: results after calls, otherwise other messages."""
    role = new[0].role
    return role is Role.TOOL if turn.tool_calls else role in (Role.USER, Role.SYSTEM)


def _free_mark(said: Any) -> str:
    """A character that occurs in none of the messages."""
    texts = list(_texts(said))
    free = next((mark for mark in _HIDING if not any(mark in text for text in texts)), None)
    if free is None:
        raise Unrenderable("a message has every character that Unicode sets aside")
    return free


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, each in value.items():
                yield from _texts(key)
                yield from _texts(each)
        case list() | tuple():
            for each in value:
                yield from _texts(each)
