"""How each completion of a session stands to the one it continues, proved token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from polar.models.completion import Completion, Ids, common_prefix
from polar.models.session import Fault
from polar.trajectory.context_index import ContextIndex, PrefixHashes

GENERATION_PROMPT = 16
"""How many tokens before a sampled span may belong to the template's opening of the turn.

Some templates open a turn in one way when it is generated and in another when it is history.
"""


class Continuation(StrEnum):
    """How a prompt holds the context of the completion that it continues."""

    CLEAN = "clean"
    """Token for token."""
    DRIFT = "drift"
    """It first differs in what the policy sampled: the same answer in other tokens, or a part of it."""
    REWRITTEN = "rewritten"
    """It first differs in what the policy was given, or ends before: the history is another one."""


@dataclass(frozen=True, slots=True)
class Relation:
    """One completion's place among those before it."""

    base: int | None = None
    """Which completion it continues; None: it begins a context."""
    shared: int = 0
    """How many tokens its prompt has in common with the base's context (prompt and sampled ids)."""
    kind: Continuation | None = None
    """None exactly where there is no base."""
    twin: int | None = None
    """The first completion with the same prompt, if this is not it."""


def context_length(completion: Completion) -> int:
    return len(completion.prompt_ids) + len(completion.sampled_ids)


class Relations:
    """The relations of a session's completions, in their order; a wrong claim of a parent is a fault.

    A completion names whom it continues (`parent`, `follows`); where it names nobody, or its claim does
    not hold, the longest context that its prompt begins with is found by hash. Either way the tokens
    are compared. Completions read from a capture share memory with those they extend, which proves
    equality without looking, so the cost is linear in the tokens that each one adds.
    """

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.faults: list[Fault] = []
        self._completions = completions
        self.found: list[Relation] = []
        self._places = {completion.id: place for place, completion in enumerate(completions)}
        self._hashes = PrefixHashes(max(map(context_length, completions), default=0))
        self._prompt_hashes: list[int] = []
        self._context_hashes: list[int] = []
        self._contexts = ContextIndex()
        self._prompts = ContextIndex()
        for place, completion in enumerate(completions):
            self.found.append(self._relate(place, completion))

    def _relate(self, place: int, completion: Completion) -> Relation:
        prompt = completion.prompt_ids
        if len(prompt) == 0:
            self._prompt_hashes.append(0)
            self._context_hashes.append(0)
            return Relation()
        relation = self._claimed(place, completion)
        if relation.kind is Continuation.CLEAN and relation.base is not None:
            before = self._context_hashes[relation.base]
            value = self._hashes.extended(before, relation.shared, prompt[relation.shared :])
        else:
            start, before = self._known_prefix(relation)
            prefixes = self._hashes.of_prefixes(before, start, prompt[start:])
            value = int(prefixes[-1])
            relation = self._found(prompt, self._contexts.longest(start, prefixes), relation)
        twin = self._prompts.get(len(prompt), value)
        if twin is not None and np.array_equal(prompt, self._completions[twin].prompt_ids):
            relation = Relation(relation.base, relation.shared, relation.kind, twin)
        else:
            self._prompts.add(len(prompt), value, place)
        self._prompt_hashes.append(value)
        context = self._hashes.extended(value, len(prompt), completion.sampled_ids)
        self._context_hashes.append(context)
        self._contexts.add(context_length(completion), context, place)
        return relation

    def _known_prefix(self, relation: Relation) -> tuple[int, int]:
        """How much of a prompt its base's prompt already is, and the hash of that much."""
        if relation.base is None:
            return 0, 0
        length = len(self._completions[relation.base].prompt_ids)
        return (length, self._prompt_hashes[relation.base]) if relation.shared >= length else (0, 0)

    def _claimed(self, place: int, completion: Completion) -> Relation:
        claimed = Relation()
        for name in (completion.parent, completion.follows):
            base = self._places.get(name or "", place)
            if base >= place or len(self._completions[base].prompt_ids) == 0:
                continue
            before = self._completions[base]
            shared = _common_with_context(completion.prompt_ids, before)
            if shared == context_length(before):
                return Relation(base, shared, Continuation.CLEAN)
            if name == completion.parent:
                problem = f"says that it extends {name}, but differs from token {shared} on"
                self.faults.append(Fault(completion=completion.id, problem=problem))
            if claimed.base is None or shared > claimed.shared:
                claimed = Relation(base, shared, self._kind(completion.prompt_ids, base, shared))
        return claimed

    def _found(self, prompt: Ids, base: int | None, claimed: Relation) -> Relation:
        """The context found by hash, if it holds and is longer than what the claim shares."""
        if base is None:
            return claimed
        before = self._completions[base]
        length = context_length(before)
        if length <= claimed.shared or _common_with_context(prompt, before) != length:
            return claimed
        return Relation(base, length, Continuation.CLEAN)

    def _kind(self, prompt: Ids, base: int, shared: int) -> Continuation:
        if shared in (0, len(prompt)):
            return Continuation.REWRITTEN
        place: int | None = base
        while place is not None:
            relation = self.found[place]
            opening = len(self._completions[place].prompt_ids) - GENERATION_PROMPT
            if shared >= max(opening, relation.shared):
                return Continuation.DRIFT
            if shared >= relation.shared:
                return Continuation.REWRITTEN
            place = relation.base
        return Continuation.REWRITTEN


def _common_with_context(ids: Ids, completion: Completion) -> int:
    """How many tokens two contexts begin with in common, that of a completion sampled ids included."""
    prompt = completion.prompt_ids
    shared = common_prefix(ids, prompt)
    if shared < len(prompt):
        return shared
    return shared + common_prefix(ids[shared:], completion.sampled_ids)
