"""Proves that a model's chat template can be rendered turn by turn, and finds out how it writes turns.

Every kind of turn (text, thoughts, calls) stands after every kind of conversation and before every kind of
new message. Each time prompt, turn and extension must be the ids that the template gives for the whole, and
the turn must be read back as it was. What the template has no form for is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product, takewhile
from pathlib import Path

from tokenizers import Tokenizer

from polar.errors import InvalidInput
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import Thinking, Unrenderable
from polar.rendering.call_forms import FORM_NAMES, HERMES, form_named, form_of
from polar.rendering.template import (
    AGAIN,
    ANSWERED,
    ASKED,
    CALLED,
    CALLED_TWICE,
    CALLS,
    LOOK,
    SEEN,
    SYSTEM,
    THOUGHT,
    THOUGHT_AND_CALLED,
    ChatTemplate,
    Conversation,
    tokenizer_config,
)
from polar.rendering.template_renderer import MARK, TemplateRenderer, goes_with
from polar.rendering.tokenizer import is_byte_level, is_spelt_in_words
from polar.rendering.tool_prompt import ToolsInText

BEFORE: dict[str, Conversation] = {
    "a question": ((ASKED,), ()),
    "a system message": ((SYSTEM, ASKED), ()),
    "tools": ((SYSTEM, ASKED), (LOOK,)),
    "an answer": ((ASKED, ANSWERED, AGAIN), ()),
    "many answers": ((SYSTEM, ASKED, *[ANSWERED, AGAIN] * 8), ()),
    "earlier thoughts": ((ASKED, THOUGHT, AGAIN), ()),
    "a result": ((SYSTEM, ASKED, CALLED, SEEN[0]), (LOOK,)),
    "thoughts before a call": ((ASKED, THOUGHT_AND_CALLED, SEEN[0]), (LOOK,)),
}
TURNS = {
    "text": ANSWERED,
    "thoughts": THOUGHT,
    "a call": CALLED,
    "thoughts and a call": THOUGHT_AND_CALLED,
    "parallel calls": CALLED_TWICE,
}
OTHER_SYSTEM = Message(Role.SYSTEM, "You are brief.")
AFTER: dict[str, tuple[Message, ...]] = {
    "a question": (AGAIN,),
    "results": SEEN,
    "another system message": (OTHER_SYSTEM, AGAIN),
    "results and a question": (*SEEN, AGAIN),
}


def proved_renderer(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    call_form: str | None,
    tool_prompt: bool,
    keeps_thoughts: bool,
) -> TemplateRenderer:
    """Build a renderer from the template; raise InvalidInput with the failed proof."""
    if call_form not in (None, *FORM_NAMES):
        raise InvalidInput(
            f"engine.tool_form: there is no {call_form}", hint=f"known: {', '.join(FORM_NAMES)}"
        )
    if not (is_byte_level(tokenizer) or is_spelt_in_words(tokenizer)):
        raise InvalidInput("its tokenizer is neither byte-level BPE nor SentencePiece with bytes")
    best: _Proof | None = None
    for form in template.forms:
        renderer = TemplateRenderer(template, form, tokenizer, keeps_thoughts=keeps_thoughts)
        proof = _Proof(template, tokenizer, renderer, call_form, tool_prompt=tool_prompt)
        proof.run()
        if best is None or proof.rank > best.rank:
            best = proof
        if best.is_complete:
            break
    assert best is not None
    if best.failures:
        raise InvalidInput(f"its chat template cannot be rendered turn by turn: {best.failures[0]}")
    return best.renderer


class _Proof:
    """Tests one form of messages on every probe."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        renderer: TemplateRenderer,
        call_form: str | None,
        *,
        tool_prompt: bool,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self.renderer = renderer
        self._call_form = call_form
        self._tool_prompt = tool_prompt
        self._ends: set[str] = set()
        self._shown = 0
        self.failures: list[str] = []

    @property
    def rank(self) -> tuple[bool, int]:
        return not self.failures, self._shown

    @property
    def is_complete(self) -> bool:
        shows_calls = self.renderer.calls is not None or "tool_calls" not in self._template.source
        return not self.failures and shows_calls

    def run(self) -> None:
        try:
            self._find_thinking()
            self._find_end()
            self._find_calls()
        except Unrenderable as error:
            self.failures.append(str(error))
            return
        thinking = self.renderer.thinking
        # What ends thoughts does not end the turn, even where the template shows its end so afterwards.
        ends = [end for end in self._ends if thinking is None or end not in thinking.end]
        self.renderer.know_marks([*map(self._id, ends), *_end_ids(self._template.directory, self._tokenizer)])
        for after, before, turn in product(AFTER, BEFORE, TURNS):
            shown = self._as_shown(TURNS[turn])
            if not self._goes_with(shown, AFTER[after]):
                continue
            try:
                why = self._try(*BEFORE[before], shown, _answers(shown, AFTER[after]))
            except Unrenderable:
                continue
            self._shown += 1
            if why:
                self.failures.append(f"{turn} between {before} and {after}: {why}")

    def _as_shown(self, turn: Message) -> Message:
        """The turn without the parts that the template hides there."""
        if self.renderer.has_one_call:
            turn = replace(turn, tool_calls=turn.tool_calls[:1])
        return replace(turn, content="") if self.renderer.says_last and turn.tool_calls else turn

    def _goes_with(self, turn: Message, new: Sequence[Message]) -> bool:
        is_readable = self.renderer.calls is not None or not turn.tool_calls
        return is_readable and goes_with(turn, new)

    def _try(
        self,
        before: Sequence[Message],
        tools: Sequence[ToolDefinition],
        turn: Message,
        new: Sequence[Message],
    ) -> str | None:
        """The mismatch of renderer and template; None if there is none."""
        renderer, roles = self.renderer, {message.role for message in new}
        extension, _ = renderer.after(before, turn, new, tools)
        if extension != self._nearby(turn, new):
            renderer.far_reaching |= roles
        if not renderer.shows_alike(before, turn, new, tools, has_thoughts=bool(turn.reasoning)):
            thinks = renderer.thinking is not None
            earlier = thinks and any(message.reasoning for message in before)
            changes = {(role, thinks and bool(turn.reasoning), earlier) for role in roles}
            if len(roles) == 1 or not renderer.rewriting & changes:
                renderer.rewriting |= changes
            return None
        renderer.extends = True
        prompt, whole = renderer.text(before, tools), renderer.text([*before, turn, *new], tools)
        if not whole.startswith(prompt) or not whole.endswith(extension):
            return "what stands around the turn depends on what it says"
        shown = whole[len(prompt) : len(whole) - len(extension)]
        parts = [renderer.tokens.ids(part) for part in (prompt, shown, extension)]
        if [*chain(*parts)] != self._ids(whole):
            return "its tokenizer joins tokens across the ends of the turn"
        return self._misread(turn, shown, parts)

    def _nearby(self, turn: Message, new: Sequence[Message]) -> str | None:
        try:
            return self.renderer.after((ASKED,), turn, new, ())[0]
        except Unrenderable:
            return None

    def _misread(self, turn: Message, shown: str, ids: Sequence[list[int]]) -> str | None:
        """The turn as parsed, if it differs."""
        if turn.content and self.renderer.think_mark + turn.content in shown:
            return None  # text beside a call is shown as a thought, not as it was sampled
        parser = self.renderer.parser((LOOK,), ids[0])
        read = parser.feed(ids[1]) + parser.finish()
        for what, said, found in (
            ("content", turn.content, read.content),
            ("thoughts", turn.reasoning or "", read.reasoning),
        ):
            if found != (said if said in shown else ""):
                return f"its {what} is read back as {found!r}"
        if LOOK.name not in shown.replace(turn.content, ""):
            return None  # some templates show calls only where there is no text
        calls, found_calls = (
            [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
            for message in (turn, read)
        )
        return None if calls == found_calls else f"its calls are read back as {found_calls}"

    def _find_thinking(self) -> None:
        """Find the marks around thoughts, or assume the usual ones if none are shown."""
        renderer = self.renderer
        prompt, whole = renderer.text((ASKED,)), renderer.text((ASKED, THOUGHT))
        answered = renderer.text((ASKED, ANSWERED))
        renderer.is_plain = answered.startswith(prompt + ANSWERED.content)
        thought = re.escape(THOUGHT.reasoning or "")
        found = re.search(rf"(\S+)\s*{thought}(\s*\S+\s*){re.escape(THOUGHT.content)}", whole)
        if found and whole.startswith(prompt):
            opening = whole[len(prompt) : whole.index(THOUGHT.reasoning or "")].rstrip()
            # Without what stands before it, where nothing stands between.
            tag = re.search(r"[<\[][^<>\[\]]*[>\]]$", found[1])
            renderer.think_mark = tag[0] if tag else found[1]
            renderer.thinking = Thinking(opening, found[2])
            renderer.is_plain = True
        elif _THINK_END in self._template.source:
            has_begun = prompt.rstrip().endswith(_THINK)
            renderer.think_mark = _THINK
            renderer.thinking = Thinking("" if has_begun else _THINK, _THINK_END)
        else:
            self._find_thinking_before_calls()

    def _find_thinking_before_calls(self) -> None:
        """Find the marks around thoughts that are shown only until the turn's calls are done."""
        renderer, thought = self.renderer, THOUGHT_AND_CALLED.reasoning or ""
        with suppress(Unrenderable):
            prompt = renderer.text((ASKED,), (LOOK,))
            whole = renderer.text((ASKED, THOUGHT_AND_CALLED, SEEN[0]), (LOOK,))
            opening, shown, rest = whole.partition(thought)
            if whole.startswith(prompt):
                opening = opening.removeprefix(prompt)
            else:
                # The prompt holds empty thoughts: those that are shown begin by themselves.
                opening = opening[opening.rindex(opening.split()[-1]) :]
            end = renderer.tokens.control.search(rest)
            if shown and end is not None and not rest[: end.start()].strip():
                renderer.think_mark, renderer.thinking = (
                    opening.rstrip(),
                    Thinking(opening, rest[: end.end()]),
                )

    def _find_end(self) -> None:
        """Find the end-of-turn token, and whether white space before it belongs to the turn."""
        renderer = self.renderer
        extension, _ = renderer.after((ASKED,), ANSWERED, (AGAIN,), ())
        end = self._first_control(extension)
        self._ends.add(end)
        spaced = renderer.text((ASKED, replace(ANSWERED, content=" a ")))
        renderer.keeps_space = renderer.thinking is None and spaced.startswith(
            f"{renderer.text((ASKED,))} a {end}"
        )

    def _find_calls(self) -> None:
        """Find the form of calls and their control tokens."""
        renderer, (end,) = self.renderer, self._ends
        if self._knows_no_tools:
            system = self._default_system() if self._tool_prompt else ""
            renderer.tools_in_text = ToolsInText(self._tool_prompt, system)
        called = next((turn for turn in (CALLED_TWICE, CALLED) if self._is_shown(turn)), None)
        renderer.has_one_call = called is CALLED and not self._is_shown(replace(CALLED_TWICE, content=""))
        if called is None:
            if self._call_form is not None:
                renderer.calls = form_named(self._call_form, "")
            elif self._template.shows_tools:
                raise Unrenderable(
                    "calls: its template shows tools and no calls; engine.tool_form names their form"
                )
            return
        results = SEEN[: len(called.tool_calls)]
        prompt = renderer.text((ASKED,), (LOOK,))
        whole = renderer.text((ASKED, renderer.stand_in(called), *results), (LOOK,))
        if called.content and results[-1].content in whole[: whole.rfind(MARK)]:
            renderer.says_last = True
            called = self._as_shown(called)
            whole = renderer.text((ASKED, renderer.stand_in(called), *results), (LOOK,))
        start, last = _shared_length(prompt, whole), whole.rfind(MARK)
        closing = renderer.tokens.control.findall(whole[last : whole.find(results[0].content, last)])
        inside = closing[: closing.index(end)] if end in closing else []
        renderer.call_marks = frozenset(renderer.tokens.control.findall(whole[start:last]) + inside)
        extension, _ = renderer.after((ASKED,), called, results, (LOOK,))
        self._ends.add(self._first_control(extension))
        whole = renderer.text((ASKED, called, *results), (LOOK,))
        with suppress(Unrenderable):
            renderer.shows_ids = renderer.text((ASKED, *_rename_calls(called, *results)), (LOOK,)) != whole
        turn = whole[_shared_length(prompt, whole) : len(whole) - len(extension)]
        try:
            said = replace(called, content=ANSWERED.content, reasoning=THOUGHT.reasoning)
            renderer.text((ASKED, said, *results), (LOOK,))
        except Unrenderable:
            renderer.hide_text_behind_thoughts()
        if renderer.thinking is not None:
            turn = turn.rpartition(renderer.thinking.end.strip())[2]
        turn = turn.replace(called.content, "", 1)
        if self._call_form is not None:
            renderer.calls = form_named(self._call_form, turn)
        else:
            renderer.calls = form_of(turn, called.tool_calls, (LOOK,))
        if renderer.calls is None:
            raise Unrenderable(f"calls: they are in no known form: {turn.strip()!r}")
        self._check_ids(called, results)

    def _check_ids(self, called: Message, results: Sequence[Message]) -> None:
        """Check that results carry the ids of their calls, in later turns too."""
        earlier = replace(CALLED, tool_calls=(replace(CALLS[0], id="call_9"),))
        messages = (ASKED, earlier, replace(SEEN[0], tool_call_id="call_9"), called, *results)
        written: Sequence[ToolCall] = ()
        with suppress(Unrenderable):
            if self.renderer.calls is not None and self.renderer.shows_ids:
                written = self.renderer.calls.calls(self.renderer.text(messages), ())
        given = self.renderer.call_ids(messages)
        if any(call.id and call.id != id for call, id in zip(written, given, strict=False)):
            raise Unrenderable("calls: results are shown under other ids than their calls")

    @property
    def _knows_no_tools(self) -> bool:
        """Whether tools and calls can only be shown as text."""
        template = self._template
        is_ours = self._call_form in (None, HERMES)
        return is_ours and not template.shows_tools and "tool_calls" not in template.source

    def _default_system(self) -> str:
        """The template's default for a missing system message."""
        marked = self.renderer.text((Message(Role.SYSTEM, MARK), ASKED))
        before, shown, after = marked.partition(MARK)
        if not shown:
            raise Unrenderable("engine.tool_prompt: its template shows no system message")
        said = self.renderer.text((ASKED,))
        if len(said) < len(before + after) or not (said.startswith(before) and said.endswith(after)):
            return ""
        return said[len(before) : len(said) - len(after)]

    def _is_shown(self, turn: Message) -> bool:
        results = SEEN[: len(turn.tool_calls)]
        try:
            text = self.renderer.text((ASKED, self.renderer.stand_in(turn), *results), (LOOK,))
        except Unrenderable:
            return False
        # Of each call its parameter and the value, whether the text beside it is shown or not.
        is_all = text.count(MARK) >= 2 * len(turn.tool_calls)
        return is_all and LOOK.name in text[text.find(ASKED.content) :]

    def _first_control(self, text: str) -> str:
        found = self.renderer.tokens.control.match(text)
        assert found is not None
        return found[0]

    def _id(self, token: str) -> int:
        return self.renderer.tokens.ids(token)[0]

    def _ids(self, text: str) -> list[int]:
        """Tokenise a template's text as a whole."""
        self._tokenizer.encode_special_tokens = False
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._tokenizer.encode_special_tokens = True
        return ids


_THINK, _THINK_END = "<think>", "</think>"
_END_OF_TEXT, _RETURN = "<|endoftext|>", "<|return|>"
"""End of text, which a model may sample when it has nothing more to say, and Harmony's end of turn, which its
template shows otherwise."""


def _shared_length(one: str, other: str) -> int:
    """Length of the common prefix, without splitting a mark."""
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    cut = re.search(r"<[^<>\s]*$", one[:place])
    return cut.start() if cut else place


def _rename_calls(*messages: Message) -> Iterator[Message]:
    """The same calls and results with ids that every form keeps."""
    names = {call.id: f"functions.x:{7 + number}" for number, call in enumerate(CALLS)}
    for message in messages:
        calls = tuple(replace(call, id=names[call.id]) for call in message.tool_calls)
        yield replace(message, tool_calls=calls, tool_call_id=names.get(message.tool_call_id or ""))


def _answers(turn: Message, new: Sequence[Message]) -> tuple[Message, ...]:
    """The new messages with the results of this turn's calls alone."""
    calls = {call.id for call in turn.tool_calls}
    return tuple(message for message in new if message.tool_call_id in (None, *calls))


def _end_ids(directory: Path, tokenizer: Tokenizer) -> list[int]:
    """The ids that end an answer by the model's own settings, and the end of text."""
    eos = tokenizer_config(directory).get("eos_token")
    named = tokenizer.token_to_id(eos["content"] if isinstance(eos, dict) else eos) if eos else None
    file = directory / "generation_config.json"
    listed = json.loads(file.read_text()).get("eos_token_id", []) if file.is_file() else []
    ids = [named, *(listed if isinstance(listed, list) else [listed])]
    ids += map(tokenizer.token_to_id, (_END_OF_TEXT, _RETURN))
    return [id for id in ids if id is not None]
