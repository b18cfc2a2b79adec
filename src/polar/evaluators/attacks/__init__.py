"""Agents that cheat: ways to get a reward that was not earned, for whoever wants to see that none works."""

from __future__ import annotations

from collections.abc import Collection

from polar.evaluators.attacks.anywhere import ANY_ATTACKS
from polar.evaluators.attacks.attack import Attack, Kind
from polar.evaluators.attacks.building import CARGO_ATTACKS, MAKE_ATTACKS
from polar.evaluators.attacks.javascript import NODE_ATTACKS
from polar.evaluators.attacks.python import PYTEST_ATTACKS, PYTHON_ATTACKS

__all__ = ["ATTACKS", "Attack", "Kind", "fitting"]

ATTACKS: tuple[Attack, ...] = (
    *ANY_ATTACKS,
    *PYTHON_ATTACKS,
    *PYTEST_ATTACKS,
    *NODE_ATTACKS,
    *MAKE_ATTACKS,
    *CARGO_ATTACKS,
)


def fitting(kinds: Collection[Kind]) -> tuple[Attack, ...]:
    """The attacks on tasks that are graded with these; those that fit every task are always among them."""
    return tuple(attack for attack in ATTACKS if attack.kind is Kind.ANY or attack.kind in kinds)
