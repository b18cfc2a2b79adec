"""How long to wait before each new attempt."""

import random


def delays(attempts, first=0.5, factor=2.0, longest=30.0, jitter=0.0, rng=random.random):
    """The pauses between `attempts` attempts.

    Each is `factor` times as long as the one before, made longer by up to the share `jitter` of
    itself, and never longer than `longest`.
    """
    pause = first
    for _ in range(attempts - 1):
        yield min(pause, longest) * (1 + jitter * rng())
        pause *= factor
