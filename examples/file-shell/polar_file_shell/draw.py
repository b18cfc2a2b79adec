"""Random names, words and numbers for one puzzle; the splits share no words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


_NOUNS = """
apple anchor arrow autumn basket beacon bicycle blanket bottle branch bread bridge bucket butter
button cabin camera candle canyon carpet castle cherry circle cloud coffee copper corner cotton
desert dinner dolphin dragon drawer engine falcon feather fence finger flower forest fossil garden
garlic glacier guitar hammer harbor helmet honey island jacket jungle kettle kitchen ladder lantern
lemon letter library lizard magnet marble market meadow melon mirror monkey morning mountain museum
needle notebook ocean office olive orange orchard oven owl paper parrot pebble pencil pepper piano
pillow planet pocket pond potato puzzle rabbit radio railway ribbon river rocket saddle salmon
school shadow shelter silver singer spider spoon squirrel station stone summer sunset table teacher
temple thunder ticket tiger tomato tower train tunnel turtle umbrella valley velvet village violin
walnut water window winter wizard yellow zebra
"""
_PEOPLE = """
Ada Ben Carla David Emma Felix Greta Hugo Ines Jonas Karin Liam Maria Noah Olga Paul Rosa Simon Tina
Udo Vera Walter Yara Zoe Anton Bella Clara Dennis Elena Frank Gloria Henry
"""
NOUNS = tuple(_NOUNS.split())
PEOPLE = tuple(_PEOPLE.split())
HELD_OUT_EVERY = 4
"""Every fourth word belongs to the held-out tasks, the others to the training tasks."""

T = TypeVar("T")


class Draw:
    """A source of randomness for one puzzle: a key always draws the same, and nothing is drawn twice."""

    def __init__(self, split: Split, key: str) -> None:
        self._random = random.Random(key)
        self._nouns = self._shuffled(NOUNS, split)
        self._people = self._shuffled(PEOPLE, split)

    def _shuffled(self, words: Sequence[str], split: Split) -> list[str]:
        own = [
            word
            for place, word in enumerate(words)
            if (place % HELD_OUT_EVERY == 0) == (split is Split.HELD_OUT)
        ]
        self._random.shuffle(own)
        return own

    def noun(self) -> str:
        return self._nouns.pop()

    def nouns(self, count: int) -> list[str]:
        return [self.noun() for _ in range(count)]

    def person(self) -> str:
        return self._people.pop()

    def file(self, ending: str = "txt") -> str:
        return f"{self.noun()}.{ending}"

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def numbers(self, count: int, high: int = 99) -> list[int]:
        return self._random.sample(range(1, high + 1), count)

    def one(self, *options: T) -> T:
        return self._random.choice(options)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self._random.sample(items, len(items))
