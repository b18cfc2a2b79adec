"""A body nested deeper than JSON can be written again is the client's fault in every dialect."""

from __future__ import annotations

import pytest

from polar.config import plugins
from polar.dialects.base import HttpRequest, Refusal, RequestRefused, RouteAction


@pytest.mark.parametrize("name", plugins.names("dialects"))
@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_a_body_nested_too_deeply_is_malformed(name: str, depth: int) -> None:
    dialect = plugins.load("dialects", name)()
    route = next(route for route in dialect.routes if route.action is RouteAction.COMPLETE)
    body = b'{"model": "m", "max_tokens": 1, "tools": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    with pytest.raises(RequestRefused) as caught:
        dialect.parse(HttpRequest(route, body, {"model": "m"}))
    assert caught.value.refusal is Refusal.MALFORMED
