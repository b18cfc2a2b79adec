"""A template may look at the whole past to extend it: of a long one that is done beside the event loop."""

from __future__ import annotations

from threading import current_thread, main_thread
from typing import Any, cast

import numpy as np
import pytest

from polar.engines.base import ModelInfo
from polar.gateway.conversation import Extension
from polar.gateway.source import TokenSource
from polar.models.chat import ChatRequest, Message, Role
from polar.recordings.growth import GrowingTree, Turn

ASKED, ANSWER = Message(Role.USER, "a"), Message(Role.ASSISTANT, "b")


class Renderer:
    """Notes where it works, and may refuse to extend."""

    def __init__(self, *, extends: bool = True) -> None:
        self.extends = extends
        self.done: list[tuple[str, bool]] = []

    def bridge(self, *args: Any, **kwargs: Any) -> list[int] | None:
        self.done.append(("bridge", current_thread() is main_thread()))
        return [7] if self.extends else None

    def render(self, *args: Any) -> list[int]:
        self.done.append(("render", current_thread() is main_thread()))
        return [8]


def turn_of(length: int) -> Turn:
    prompt, sampled = np.ones(length - 1, np.int32), np.ones(1, np.int32)
    return GrowingTree().prove("c", prompt, sampled, (ASKED, ANSWER))


async def counted(renderer: Renderer, turn: Turn) -> int | None:
    source = TokenSource(cast(Any, None), cast(Any, renderer), ModelInfo("m", 1_000_000, 0))
    request = ChatRequest("m", (ASKED, ANSWER, ASKED))
    return await source.count(request, Extension(turn, (ASKED,)))


@pytest.mark.parametrize(("length", "is_on_loop"), [(100, True), (100_000, False)])
async def test_only_a_short_past_is_extended_on_the_loop(length: int, is_on_loop: bool) -> None:
    renderer = Renderer()
    assert await counted(renderer, turn_of(length)) == length + 1
    assert renderer.done == [("bridge", is_on_loop)]


async def test_what_cannot_be_extended_is_tried_once() -> None:
    renderer = Renderer(extends=False)
    assert await counted(renderer, turn_of(100)) == 1
    assert renderer.done == [("bridge", True), ("render", False)]
