"""Where branches leave a session: the strategies that a task names under `branching.at`."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from polar.models.chat import FinishReason, Message, Role
from polar.models.completion import REPLAYED, SUPERSEDED
from polar.models.component import Frozen
from polar.models.trace import Lineage
from polar.recordings.tree import Continuation, TokenTree
from polar.trajectory.accounting import logprob_problem
from polar.trajectory.lineage import Ancestry, trace_ancestry

MOST_POINTS = 64
"""Places that a strategy of Polar's own can be asked for."""


class BranchingStrategy(ABC):
    """Chooses the model calls before which branches leave a session that has completed."""

    class Options(Frozen):
        """What a task says of the strategy."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    def points(self, tree: TokenTree) -> tuple[int, ...]:
        """After how many of the session's model calls branches leave it, ascending; empty: none does.

        A branch that leaves after 3 calls is given the answers 0, 1 and 2 of `tree.completions`, and what
        was answered by completion 3 is sampled again. The same tree always gives the same points.
        """


def turns(tree: TokenTree) -> list[int]:
    """The calls of the main conversation that were answered, also after its history was compacted.

    Of several answers to one prompt it is the first. Side calls and sub-agents are no turns.
    """
    ancestry = trace_ancestry(tree)
    line = _main_line(ancestry)
    found: dict[int, int] = {}
    for place, completion in enumerate(tree.completions):
        is_side_call = ancestry.of[place] not in line or ancestry.rules[place] is not None
        is_side_call |= SUPERSEDED in completion.extra
        if not is_side_call and completion.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
            found.setdefault(_first_asked(tree, place), place)
    return list(found.values())


def places(tree: TokenTree) -> list[int]:
    """The turns before which a branch may leave: those that the session sampled itself, but the first.

    Before that one a sample has no beginning to share, and a branch is the session that it left.
    """
    return _own_turns(tree)[1:]


def _own_turns(tree: TokenTree) -> list[int]:
    return [place for place in turns(tree) if REPLAYED not in tree.completions[place].extra]


def _main_line(ancestry: Ancestry) -> set[int]:
    """The main conversation, and those that took it over when its history was compacted."""
    line: set[int] = set()
    for place, one in enumerate(ancestry.conversations):
        if one.lineage is Lineage.MAIN or (one.lineage is Lineage.COMPACTED and one.parent in line):
            line.add(place)
    return line


def _first_asked(tree: TokenTree, place: int) -> int:
    """The first completion with the same prompt."""
    twin = tree.links[place].twin
    return place if twin is None else twin


def _not_zero(call: int) -> int:
    if call == 0:
        raise ValueError("before the first call there is nothing to share: `samples` counts such sessions")
    return call


class FixedCalls(BranchingStrategy):
    """Branches leave at the same turns of every session; one that a session does not have is left out."""

    class Options(Frozen):
        calls: tuple[Annotated[int, AfterValidator(_not_zero)], ...] = Field(
            min_length=1, max_length=MOST_POINTS
        )
        """After how many calls of the main conversation; −1: all but its last is shared."""

    options: Options

    def points(self, tree: TokenTree) -> tuple[int, ...]:
        found, allowed = turns(tree), set(places(tree))
        asked = {found[call] for call in self.options.calls if -len(found) <= call < len(found)}
        return tuple(sorted(asked & allowed))


class Uniform(BranchingStrategy):
    """Branches leave anywhere in the main conversation, whatever was said there."""

    class Options(Frozen):
        count: int = Field(default=1, ge=1, le=MOST_POINTS)
        """Places; a session with fewer turns has fewer."""
        seed: int | None = None
        """Draw them at random, other ones for every session; None: they are spread evenly."""

    options: Options

    def points(self, tree: TokenTree) -> tuple[int, ...]:
        allowed = places(tree)
        total, count = len(allowed), min(self.options.count, len(allowed))
        if self.options.seed is None:
            return tuple(allowed[(2 * part + 1) * total // (2 * count)] for part in range(count))
        # The last completion is the session's own also where a branch shares the others.
        own = tree.completions[-1].id if tree.completions else ""
        return tuple(sorted(random.Random(f"{self.options.seed} {own}").sample(allowed, count)))


class Entropy(BranchingStrategy):
    """Branches leave before the turns of which the policy was least certain.

    That is the mean of −logprob over the tokens of a turn, which estimates the entropy they were drawn with.
    """

    class Options(Frozen):
        count: int = Field(default=1, ge=1, le=MOST_POINTS)
        """Turns; those without logprobs are no candidates."""

    options: Options

    def points(self, tree: TokenTree) -> tuple[int, ...]:
        ranked = sorted((-uncertainty, place) for place, uncertainty in _uncertainties(tree))
        return tuple(sorted(place for _, place in ranked[: self.options.count]))


def _uncertainties(tree: TokenTree) -> Iterator[tuple[int, float]]:
    for place in places(tree):
        completion = tree.completions[place]
        if len(completion.sampled_ids) and logprob_problem(completion) is None:
            yield place, -float(completion.logprobs.mean(dtype="float64"))


class FirstFailure(BranchingStrategy):
    """Branches leave before the first turn whose tool result tells of a failing test or command; none leaves
    where that is the first turn that the session sampled.

    Only plain statements count: an exit code other than 0 where the harness puts it, at the beginning or the
    end of the result, and the line with which a test runner sums up. No branch leaves without one.
    """

    class Options(Frozen):
        commands: bool = True
        """Whether an exit code counts; false: failing tests alone do. OpenCode shows no exit codes."""

    options: Options

    def points(self, tree: TokenTree) -> tuple[int, ...]:
        failed = set(self._failed(tree))
        found = [place for place in _own_turns(tree) if _first_asked(tree, place) in failed][:1]
        return tuple(found) if set(found) <= set(places(tree)) else ()

    def _failed(self, tree: TokenTree) -> Iterator[int]:
        """The prompts whose answers led to a failure."""
        for completion, link in zip(tree.completions, tree.links, strict=True):
            if link.continues is None or link.kind is Continuation.REWRITTEN:
                continue
            seen = len(tree.completions[link.continues].messages) + 1
            if any(map(self._tells_failure, completion.messages[seen:])):
                yield _first_asked(tree, link.continues)

    def _tells_failure(self, message: Message) -> bool:
        if message.role is not Role.TOOL:
            return False
        # Some harnesses give results as JSON.
        text = _COLOUR.sub("", message.content).replace("\\n", "\n")
        lines = text.strip().splitlines()
        told = {*lines[:_FEW_LINES], *lines[-_FEW_LINES:]}
        is_failed_command = self.options.commands and any(map(_EXIT_CODE.fullmatch, told))
        return is_failed_command or _FAILED_TEST.search(text) is not None


_FEW_LINES = 4
"""At each end of a result: within them harnesses put what they say of a command themselves."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXIT_CODE = re.compile(
    r"\W*(?:Error: )?(?:(?:process|command) exited with code|exit code:?|returncode\W{1,3})"
    r"\s*-?[1-9]\d*(?:</returncode>)?\W*",
    re.IGNORECASE,
)
_FAILED_TEST = re.compile(
    "|".join(
        (
            r"^(?:=+ )?(?:\d+ \w+, )*\d+ (?:failed|errors?)\b.* in \d[\d.]*s\b",  # pytest
            r"^FAILED \((?:failures|errors)=\d",  # unittest
            r"^--- FAIL: |^FAIL\t",  # go test
            r"^test result: FAILED\.",  # cargo test
            r"^[ \t]*Tests:?[ \t]+\d+ failed\b",  # Jest, Vitest
            r"^[ \t]+\d+ failing$",  # Mocha
            r"^not ok \d+\b(?!.*# (?:TODO|SKIP))",  # TAP
            r"^(?:\[\w+\] )?Tests run: \d+, Failures: (?:[1-9]|0, Errors: [1-9])",  # JUnit
            r"^\d+% tests passed, [1-9]\d* tests? failed",  # CTest
            r"^\d+ examples?, [1-9]\d* failures?\b",  # RSpec
        )
    ),
    re.MULTILINE,
)
