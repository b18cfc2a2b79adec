"""An answer and its request may be large, as recordings are: they do not wait for the garbage collector."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from polar.client import AsyncClient, Client
from polar.errors import NotFound
from tests.fakes.garbage import alive, no_garbage_collector


def test_a_client_frees_an_answer_once_it_is_read(plane: Any) -> None:
    with Client(plane.url, plane.token) as client, no_garbage_collector():
        before = len(alive(httpx.Request)), len(alive(httpx.Response))
        client.health()
        with pytest.raises(NotFound):
            client.session("none")
        assert (len(alive(httpx.Request)), len(alive(httpx.Response))) == before


async def test_an_async_client_frees_an_answer_once_it_is_read(plane: Any) -> None:
    async with AsyncClient(plane.url, plane.token) as client:
        with no_garbage_collector():
            before = len(alive(httpx.Request)), len(alive(httpx.Response))
            await client.health()
            with pytest.raises(NotFound):
                await client.session("none")
            assert (len(alive(httpx.Request)), len(alive(httpx.Response))) == before
