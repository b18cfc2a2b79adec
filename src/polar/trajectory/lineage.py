"""The role of each completion in a session: main line, summary, sub-agent or side call.

Harnesses seldom report it, so it is inferred from the recording: which completion each one continues, its
prompt, tools and time, and the agent ids that some harnesses send.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from polar.models.chat import Role
from polar.models.completion import SUPERSEDED, Completion
from polar.models.trace import Lineage
from polar.recordings.tree import Continuation, Link, TokenTree

AGENT, PARENT_AGENT = "agent_id", "parent_agent_id"
"""Keys of `Completion.extra` with a harness's own agent ids."""


_CONTEXTS_AFTER = 4
"""Maximum later contexts searched for a call's answer."""
_LINES = 64
"""Maximum lines of an answer to look for."""
_LEAST_QUOTED = 100
"""Minimum characters of a quoted summary; titles and stock phrases are shorter."""


class AuxiliaryRule(StrEnum):
    """Why a completion counts as a side call."""

    PROBE = "probe"
    """A request for a single token, to check quota or connection."""
    TOOLLESS = "toolless"
    """A single question without tools, beside a main conversation with tools, such as for a title."""


@dataclass(slots=True)
class Conversation:
    """Completions that continue each other, whether or not their tokens do."""

    first: int
    """Position of its first completion."""
    members: list[int] = field(default_factory=list)
    prompts: int = 0
    """Number of distinct prompts."""
    offers_tools: bool = False
    lineage: Lineage = Lineage.MAIN
    parent: int | None = None
    """Index of the conversation that started it."""


@dataclass(frozen=True, slots=True)
class Ancestry:
    """The conversations of a session."""

    conversations: tuple[Conversation, ...]
    of: tuple[int, ...]
    """Conversation by completion."""
    rules: tuple[AuxiliaryRule | None, ...]
    """Reason for a side call, by completion; None for others."""

    def lineage(self, place: int) -> Lineage:
        return Lineage.AUXILIARY if self.rules[place] else self.conversations[self.of[place]].lineage


def trace_ancestry(tree: TokenTree) -> Ancestry:
    """Find each conversation's parent and role."""
    completions = tree.completions
    found, of = _conversations(tree)
    main = _main(completions, found, of)
    rules = [_rule(completions[place], found[of[place]], found, main) for place in range(len(completions))]
    for place in _summaries(completions, tree.links, rules):
        rules[place], found[of[place]].lineage = None, Lineage.SUMMARY
    _name(completions, found, rules, main)
    return Ancestry(tuple(found), tuple(of), tuple(rules))


def _conversations(tree: TokenTree) -> tuple[list[Conversation], list[int]]:
    found: list[Conversation] = []
    of: list[int] = []
    for place, (completion, link) in enumerate(zip(tree.completions, tree.links, strict=True)):
        before = link.continues if link.continues is not None else link.twin
        if SUPERSEDED in completion.extra:
            before = None
        if before is None or completion.extra.get(AGENT) != tree.completions[before].extra.get(AGENT):
            of.append(len(found))
            found.append(Conversation(first=place))
        else:
            of.append(of[before])
        conversation = found[of[place]]
        conversation.members.append(place)
        conversation.prompts += link.twin is None
        conversation.offers_tools |= bool(completion.tools)
    return found, of


def _main(completions: Sequence[Completion], found: Sequence[Conversation], of: Sequence[int]) -> int | None:
    """The first conversation with tools that is not a side call, else the first that is not."""
    plain = [
        place
        for place, completion in enumerate(completions)
        if not _is_probe(completion) and SUPERSEDED not in completion.extra
    ]
    places = [place for place in plain if found[of[place]].offers_tools] or plain
    return of[places[0]] if places else None


def _is_probe(completion: Completion) -> bool:
    return completion.asked.max_tokens == 1


def _rule(
    completion: Completion, own: Conversation, found: Sequence[Conversation], main: int | None
) -> AuxiliaryRule | None:
    if _is_probe(completion):
        return AuxiliaryRule.PROBE
    is_single = own.prompts == 1 and not own.offers_tools
    is_beside = main is not None and found[main].offers_tools
    return AuxiliaryRule.TOOLLESS if is_single and is_beside else None


def _summaries(
    completions: Sequence[Completion],
    links: Sequence[Link],
    rules: Sequence[AuxiliaryRule | None],
) -> list[int]:
    """Apparent side calls that are summaries, since a later context begins with their answer."""
    begun = [
        place
        for place, link in enumerate(links)
        if rules[place] is None and link.kind in (None, Continuation.REWRITTEN)
    ]
    return [
        place
        for place, rule in enumerate(rules)
        if rule is AuxiliaryRule.TOOLLESS
        and any(
            _quotes(completions[later], completions[place])
            for later in begun[bisect(begun, place) :][:_CONTEXTS_AFTER]
        )
    ]


def _quotes(context: Completion, call: Completion) -> bool:
    """Whether a context contains most lines of an answer that its prompt did not contain."""
    given = "\n".join(message.content for message in context.messages if message.role is not Role.TOOL)
    asked = "\n".join(message.content for message in call.messages)
    lines = [line.strip() for line in call.response.content.split("\n", _LINES)[:_LINES]]
    quoted = sum(len(line) for line in lines if line in given and line not in asked)
    return quoted >= max(_LEAST_QUOTED, sum(map(len, lines)) / 2)


def _name(
    completions: Sequence[Completion],
    found: Sequence[Conversation],
    rules: Sequence[AuxiliaryRule | None],
    main: int | None,
) -> None:
    """Assign lineage and parent to each conversation, in order of their start."""
    if main is None:
        return
    heads = {completions[found[main].first].extra.get(AGENT): main}
    """The current conversation of each agent."""
    main_agent = next(iter(heads))
    for place, conversation in enumerate(found):
        if place == main:
            continue
        first = completions[conversation.first]
        agent = first.extra.get(AGENT)
        head = heads.get(agent)
        if conversation.lineage is Lineage.SUMMARY:
            conversation.parent = head if head is not None else heads[main_agent]
        elif rules[conversation.first] is not None:
            conversation.lineage, conversation.parent = Lineage.AUXILIARY, heads[main_agent]
        elif head is not None and _takes_over(completions, found[head], conversation):
            conversation.lineage, conversation.parent = Lineage.COMPACTED, head
            heads[agent] = place
        else:
            named = heads.get(first.extra.get(PARENT_AGENT))
            conversation.lineage = Lineage.SUBAGENT
            conversation.parent = named if named is not None else heads[main_agent]
            heads.setdefault(agent, place)


def _takes_over(completions: Sequence[Completion], before: Conversation, after: Conversation) -> bool:
    """Whether a conversation continues another's work: same system prompt, and that one then ended."""
    if before.members[-1] > after.first or before.offers_tools != after.offers_tools:
        return False
    return _system(completions[before.first]) == _system(completions[after.first])


def _system(completion: Completion) -> str | None:
    messages = completion.messages
    return messages[0].content if messages and messages[0].role is Role.SYSTEM else None
