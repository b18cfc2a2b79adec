"""What waits for the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    """Only what nothing refers to is freed meanwhile: a cycle of references stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(kind: type[T]) -> list[T]:
    """The objects of this type that there are."""
    return [one for one in gc.get_objects() if isinstance(one, kind)]
