"""In a world whose true values are known, what branches credit is right on average."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from statistics import fmean

import numpy as np
import pytest

from polar.trajectory.group_tree import GroupTree
from polar.trajectory.learnable import Advantage

CALLS, SAMPLES = 3, 4
POLICY = {
    "": 0.4, "0": 0.7, "1": 0.2, "00": 0.5, "01": 0.8, "10": 0.3, "11": 0.6,
}  # fmt: skip
"""What was done so far → how likely the policy does 1 next, and not 0."""
WORTH = {
    "000": 0.0, "001": 0.3, "010": 0.5, "011": 1.0, "100": 0.9, "101": 0.1, "110": 0.0, "111": 0.3,
}  # fmt: skip
"""What was done in all → how likely the session is rewarded."""


def value(history: str) -> float:
    """The reward that the policy has to expect from here on."""
    if len(history) == CALLS:
        return WORTH[history]
    return POLICY[history] * value(history + "1") + (1 - POLICY[history]) * value(history + "0")


def reached(history: str) -> float:
    """How likely the policy comes here."""
    steps = ((history[:at], done) for at, done in enumerate(history))
    return math.prod(POLICY[before] if done == "1" else 1 - POLICY[before] for before, done in steps)


def slope(history: str, done: str) -> float:
    """How fast the logarithm of what was likely to be done rises with the logit of doing 1."""
    return (done == "1") - POLICY[history]


GRADIENT = {
    history: reached(history) * sum(
        (p if done == "1" else 1 - p) * slope(history, done) * value(history + done) for done in "01"
    )
    for history, p in POLICY.items()
}  # fmt: skip
"""How fast the expected reward rises with each logit of the policy."""


class Rollouts:
    """A group of sessions of the policy, and branches at places that are chosen without looking further."""

    def __init__(self, chance: np.random.Generator, width: int | None = None) -> None:
        self._chance, self._width = chance, width
        self.paths: list[list[str]] = []
        """The completions of each session."""
        self.done: list[str] = []
        self.history: dict[str, str] = {}
        """Completion → what had been done before it."""
        for _ in range(SAMPLES):
            self._sample()
        for origin in range(SAMPLES):
            for calls in chance.permutation(CALLS)[: chance.integers(0, 3)]:
                self._branch(origin, int(calls), depth=2)
        self.rewards = [float(chance.random() < WORTH[done]) for done in self.done]

    def _branch(self, origin: int, calls: int, depth: int) -> None:
        if not calls:
            return
        count = int(self._chance.integers(1, 3)) if self._width is None else self._width - 1
        made = [self._sample(origin, calls) for _ in range(count)]
        later = calls + 1
        if depth > 1 and later < CALLS and self._chance.random() < 0.5:
            self._branch(made[0], later, depth - 1)

    def _sample(self, origin: int | None = None, calls: int = 0) -> int:
        done = "" if origin is None else self.done[origin][:calls]
        session = len(self.paths)
        self.paths.append([] if origin is None else self.paths[origin][:calls])
        for call in range(calls, CALLS):
            self.paths[session].append(f"{session}.{call}")
            self.history[f"{session}.{call}"] = done
            done += str(int(self._chance.random() < POLICY[done]))
        self.done.append(done)
        return session

    def trained(self) -> Iterator[tuple[int, str, str, str]]:
        """Each completion once: in which session, its id, what had been done, and what it did."""
        for session, path in enumerate(self.paths):
            for id in path:
                history = self.history[id]
                if id.startswith(f"{session}."):
                    yield session, id, history, self.done[session][len(history)]


class Samples(defaultdict[str, list[float]]):
    def __init__(self) -> None:
        super().__init__(list)

    def errors(self, expected: dict[str, float]) -> list[float]:
        """How far each mean is from what it should be, in standard errors."""
        return [
            (fmean(found) - expected[name]) / (float(np.std(found)) / math.sqrt(len(found)) or 1e-9)
            for name, found in self.items()
        ]


@cache
def measured(kind: Advantage, width: int | None, groups: int = 5000) -> tuple[Samples, Samples]:
    """Of many groups, what each came to: the gradient by logit, and advantages by what was done where."""
    gradients, advantages = Samples(), Samples()
    for seed in range(groups):
        made = Rollouts(np.random.default_rng([kind is Advantage.TREE, width or 0, seed]), width)
        tree = GroupTree(made.paths)
        found = tree.advantages(made.rewards, kind) or [0.0] * len(tree.stretches)
        total = dict.fromkeys(POLICY, 0.0)
        begun: set[int] = set()
        for session, id, history, done in made.trained():
            at = tree.stretch_of(session, id)
            total[history] += tree.stretches[at].share * found[at] * slope(history, done) / tree.samples
            if at not in begun:
                begun.add(at)
                advantages[history + done].append(found[at])
        for history, one in total.items():
            gradients[history].append(one)
    return gradients, advantages


@pytest.mark.parametrize(
    ("kind", "width"), [(Advantage.TREE, None), (Advantage.TURN, SAMPLES), (Advantage.TURN, 2)]
)
def test_the_mean_of_many_advantages_is_the_true_one(kind: Advantage, width: int | None) -> None:
    """Up to the factor that comparing n with a mean of which each is a part has: with `tree` that of GRPO,
    wherever it is; with `turn` that of each place."""
    true = {}
    for history in [*filter(None, POLICY), *WORTH]:
        parts = SAMPLES if width is None or len(history) == 1 else width
        true[history] = (1 - 1 / parts) * (value(history) - value(history[:-1]))
    found = measured(kind, width)[1]
    assert found.keys() == true.keys()
    assert max(map(abs, found.errors(true))) < 4


@pytest.mark.parametrize(("kind", "width"), [(Advantage.TREE, None), (Advantage.TURN, SAMPLES)])
def test_the_mean_of_many_gradients_is_that_of_grpo(kind: Advantage, width: int | None) -> None:
    """Which is the policy's, up to one factor: branches add no weight, and no bias."""
    true = {history: (1 - 1 / SAMPLES) * one for history, one in GRADIENT.items()}
    assert max(map(abs, measured(kind, width)[0].errors(true))) < 4
