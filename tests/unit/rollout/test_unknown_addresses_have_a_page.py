"""A person who asks the server for an address that there is not gets a page, a program gets JSON."""

from __future__ import annotations

import httpx
import pytest

from polar.rollout.server import RolloutServer

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize("path", ["/nothing", "/tasks/a/b", "/api/v1/nothing", "/assets/nothing.js"])
async def test_a_browser_gets_a_page_with_a_way_on(server: RolloutServer, path: str) -> None:
    headers = {"Accept": BROWSER, "Authorization": "Bearer a token for tests only"}
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, headers=headers) as http:
        answer = await http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert 'href="/"' in answer.text
    assert answer.headers["content-security-policy"]


async def test_a_program_gets_a_problem(http: httpx.AsyncClient) -> None:
    answer = await http.get("/nothing")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
