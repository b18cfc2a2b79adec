"""Whole random sessions: agents, sub-agents, retries and edits over an odd tokenizer and an odd template.

The world is small but behaves like the real one: the policy samples tokenisations that the tokenizer would
never choose, templates render history otherwise than they opened the turn, clients hang up, engines
lose numbers. What comes out is a list of completions as the gateway would have recorded them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from hypothesis import strategies as st

from polar.models.chat import FinishReason, Message, Role, Sampling, ToolDefinition
from polar.models.completion import Completion

LETTERS = "abcd "
ROLES = {Role.SYSTEM: 900, Role.USER: 901, Role.ASSISTANT: 902, Role.TOOL: 903}
END, END_IN_HISTORY, THINK, END_THINK, TOOLS = 910, 911, 912, 913, 914
SHELL = (ToolDefinition("shell"),)


def letter(character: str) -> int:
    return LETTERS.index(character)


def encode(text: str) -> list[int]:
    """Pairs of letters where it can, so that text joined is not tokenised as its parts are."""
    pairs = [100 + 10 * letter(text[at]) + letter(text[at + 1]) for at in range(0, len(text) - 1, 2)]
    return pairs + ([letter(text[-1])] if len(text) % 2 else [])


def decode(ids: list[int]) -> str:
    plain = [divmod(token - 100, 10) if token >= 100 else (token,) for token in ids if token < 900]
    return "".join(LETTERS[place] for pair in plain for place in pair)


@dataclass(frozen=True)
class Template:
    """The ways in which chat templates are known to differ between a live turn and its replay."""

    drops_thinking: bool = False
    opens_thinking: bool = False
    """The generation prompt begins the thinking, history does not show it."""
    ends_otherwise: bool = False
    joins_messages: bool = False
    """Nothing separates a message from the next, so merges cross the boundary."""

    def render(self, messages: tuple[Message, ...], has_tools: bool) -> list[int]:
        ids = [TOOLS] if has_tools else []
        pending = ""
        for message in messages:
            if not self.joins_messages:
                ids += [*encode(pending), ROLES[message.role]]
                pending = ""
            if message.reasoning and not self.drops_thinking:
                ids += [*encode(pending), THINK, *encode(message.reasoning), END_THINK]
                pending = ""
            pending += message.content
            if not self.joins_messages:
                is_odd = message.role is Role.ASSISTANT and self.ends_otherwise
                ids += [*encode(pending), END_IN_HISTORY if is_odd else END]
                pending = ""
        return [*ids, *encode(pending), *self.opening()]

    def opening(self) -> list[int]:
        return [ROLES[Role.ASSISTANT], *([THINK] if self.opens_thinking else [])]


@dataclass
class Talk:
    """One conversation of the harness."""

    messages: tuple[Message, ...]
    has_tools: bool = True
    extra: dict[str, str] = field(default_factory=dict)
    last: Completion | None = None
    """The completion whose answer it goes on from, while its history is as recorded."""


TEXTS = st.text(LETTERS, min_size=1, max_size=7)
EVENTS = st.sampled_from(
    ["turn"] * 8 + ["retry", "retry", "hang_up", "subagent", "compact", "edit", "probe", "title", "side_call"]
)


class World:
    """Plays a session by drawing what happens next."""

    def __init__(self, draw: st.DrawFn, *, tokens_mode: bool, template: Template, sound: bool) -> None:
        self.completions: list[Completion] = []
        self._draw = draw
        self._tokens_mode = tokens_mode
        self._template = template
        self._sound = sound
        self._names = count()
        self._talks = [Talk((Message(Role.SYSTEM, "a bad cab"), Message(Role.USER, draw(TEXTS))))]

    def play(self, events: int) -> list[Completion]:
        self._answer(self._talks[0])
        for _ in range(events):
            talk = self._draw(st.sampled_from(self._talks))
            getattr(self, "_" + self._draw(EVENTS))(talk)
        return self.completions

    def _turn(self, talk: Talk) -> None:
        role = self._draw(st.sampled_from([Role.USER, Role.TOOL]))
        talk.messages += (Message(role, self._draw(TEXTS)),)
        self._answer(talk)

    def _retry(self, talk: Talk) -> None:
        """The last request again; the conversation goes on with either answer."""
        before = talk.last
        if before is None:
            return
        talk.messages = talk.messages[:-1]
        again = self._record(talk, before.prompt_ids.tolist(), parent=before.parent, follows=before.follows)
        talk.last = self._draw(st.sampled_from([before, again]))
        talk.messages += (talk.last.response,)

    def _hang_up(self, talk: Talk) -> None:
        talk.messages += (Message(Role.USER, self._draw(TEXTS)),)
        prompt, parent, follows = self._prompt(talk)
        self._record(talk, prompt, parent, follows, finish_reason=FinishReason.CANCELLED)
        if self._draw(st.booleans()):
            self._answer(talk)

    def _subagent(self, talk: Talk) -> None:
        extra = {"agent_id": f"a{next(self._names)}"} if self._draw(st.booleans()) else {}
        messages = (Message(Role.SYSTEM, "dad"), Message(Role.USER, self._draw(TEXTS)))
        self._talks.append(Talk(messages, extra=extra))
        self._answer(self._talks[-1])

    def _compact(self, talk: Talk) -> None:
        talk.messages = (talk.messages[0], Message(Role.USER, self._draw(TEXTS)))
        talk.last = None
        self._answer(talk)

    def _edit(self, talk: Talk) -> None:
        at = self._draw(st.integers(0, len(talk.messages) - 1))
        changed = replace(talk.messages[at], content=self._draw(TEXTS), reasoning=None)
        talk.messages = (*talk.messages[:at], changed, *talk.messages[at + 1 :])
        talk.last = None
        self._turn(talk)

    def _probe(self, talk: Talk) -> None:
        probe = Talk((Message(Role.USER, "abba"),), has_tools=False)
        self._record(probe, self._prompt(probe)[0], None, None, asked=Sampling(max_tokens=1))

    def _title(self, talk: Talk) -> None:
        self._answer(
            Talk((Message(Role.SYSTEM, "c"), Message(Role.USER, self._draw(TEXTS))), has_tools=False)
        )

    def _side_call(self, talk: Talk) -> None:
        side = Talk((Message(Role.USER, self._draw(TEXTS)),))
        self._record(side, self._prompt(side)[0], None, None, asked=Sampling(max_tokens=1))

    def _answer(self, talk: Talk) -> None:
        prompt, parent, follows = self._prompt(talk)
        talk.last = self._record(talk, prompt, parent, follows)
        talk.messages += (talk.last.response,)

    def _prompt(self, talk: Talk) -> tuple[list[int], str | None, str | None]:
        """The prompt's ids, and whom it is recorded to extend and to follow."""
        before = talk.last
        if before is None or not self._tokens_mode:
            follows = before.id if before is not None and self._draw(st.integers(0, 4)) else None
            return self._template.render(talk.messages, talk.has_tools), None, follows
        known = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
        new = talk.messages[len(before.messages) + 1 :]
        return [*known, *self._template.render(new, has_tools=False)], before.id, before.id

    def _record(
        self,
        talk: Talk,
        prompt: list[int],
        parent: str | None,
        follows: str | None,
        *,
        finish_reason: FinishReason | None = None,
        asked: Sampling = Sampling(),
    ) -> Completion:
        reasoning = self._draw(st.sampled_from(["", "", "bc"]))
        spoken = [letter(character) for character in self._draw(TEXTS)]
        if self._draw(st.booleans()):
            spoken = encode(decode(spoken))
        end = finish_reason or self._draw(
            st.sampled_from([FinishReason.STOP] * 5 + [FinishReason.LENGTH, FinishReason.ERROR])
        )
        opening = [] if self._template.opens_thinking else [THINK]
        thinking = [*opening, *encode(reasoning), END_THINK] if reasoning else []
        # A stop string ends the turn without the token that ends turns.
        ending = [END] if end is FinishReason.STOP and self._draw(st.integers(0, 5)) else []
        sampled = [*thinking, *spoken, *ending]
        logprobs = [-(token % 97) / 100 for token in sampled]
        untrainable = None
        if not self._sound and self._draw(st.integers(0, 9)) == 0:
            bad = [[], [float("nan")] * len(sampled), [0.5] * len(sampled), logprobs[:-1]]
            logprobs = self._draw(st.sampled_from(bad))
            untrainable = self._draw(st.sampled_from([None, "the engine gave no logprobs"]))
        made = Completion(
            id=f"c{len(self.completions)}",
            index=len(self.completions),
            prompt_ids=np.array(prompt, np.int32),
            sampled_ids=np.array(sampled, np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy_versions=np.full(len(sampled), len(self.completions) // 3, np.int32),
            messages=talk.messages,
            response=Message(Role.ASSISTANT, decode(spoken), reasoning=reasoning or None),
            finish_reason=end,
            parent=parent,
            follows=follows,
            tools=SHELL if talk.has_tools else (),
            asked=asked,
            untrainable=untrainable,
            extra=talk.extra,
        )
        self.completions.append(made)
        return made


TEMPLATES = st.builds(Template, st.booleans(), st.booleans(), st.booleans(), st.booleans())


@st.composite
def agent_sessions(
    draw: st.DrawFn, *, tokens_mode: bool | None = None, sound: bool = False, max_events: int = 14
) -> list[Completion]:
    """The completions of one session, in the order they ended."""
    mode = draw(st.booleans()) if tokens_mode is None else tokens_mode
    world = World(draw, tokens_mode=mode, template=draw(TEMPLATES), sound=sound)
    return world.play(draw(st.integers(0, max_events)))
