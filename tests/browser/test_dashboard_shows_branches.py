"""The tree of a group in a real browser: where branches part, what they came to, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Locator, Route, expect

from tests.dashboards import HOSTILE, NARROW, WIDE, Fleet

pytestmark = pytest.mark.xdist_group("browser")

Opens = Callable[..., Any]

TREE = [
    "sample 0|1",
    "branch 3 after 5 calls|0",
    "branch 4 after 5 calls|1",
    "branch 1 after 1 call|0",
    "branch 2 after 1 call|1",
    "branch 5 after 5 calls|0",
]
"""Each session below the one it left, with its reward."""


def test_the_tree_of_a_group_shows_where_branches_part(reader: Opens) -> None:
    page = reader().open("/tasks/repair-tree", ".branches li")
    rows = page.get_by_role("list", name="Tree of the group").locator("li:not(.scale)")
    shown = [
        f"{row.locator('.name').inner_text()}|{row.locator('.outcome').inner_text()}" for row in rows.all()
    ]
    assert shown == TREE
    assert [row.locator(".state").get_attribute("title") for row in rows.all()] == ["completed"] * 6
    expect(page.get_by_text("Branching").locator("..")).to_have_text("Branchingcalls")
    rows.nth(1).get_by_role("link", name="branch 3", exact=True).click()
    expect(page.locator("main h1")).to_have_text("repair-tree.3")


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_branches_hang_on_the_line_that_they_left(reader: Opens, width: int) -> None:
    page = reader(width=width).open("/tasks/repair-tree", ".branches li")
    rows = page.locator(".branches li:not(.scale)")

    def edges(at: int, part: str) -> tuple[float, float, float]:
        box = rows.nth(at).locator(part).first.bounding_box()
        assert box is not None
        return box["x"], box["x"] + box["width"], box["y"]

    left, right, _ = edges(0, ".own")
    call = (right - left) / 6
    assert [round((edges(at, ".own")[0] - left) / call) for at in range(5)] == [0, 5, 5, 1, 1]
    trunk = rows.nth(0).locator(".down")
    assert sorted(round((middle(one) - left) / call) for one in trunk.all()) == [1, 5]
    # What leads to the last two branches passes the two before them.
    assert [rows.nth(at).locator(".down").count() for at in range(5)] == [2, 2, 2, 1, 2]


def middle(one: Locator) -> float:
    box = one.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2


def test_a_group_without_branches_has_no_tree(reader: Opens) -> None:
    someone = reader()
    page = someone.open("/tasks/repair-app", "main tbody tr")
    assert page.locator(".branches").count() == 0
    page = someone.open("/sessions/repair-app.0", "[data-part=call] .message")
    assert page.get_by_role("region", name="Origin").count() == 0


def test_two_leaves_are_compared_from_where_they_part(reader: Opens) -> None:
    page = reader().open("/tasks/repair-tree", ".branches li")
    page.get_by_role("link", name="Compare branch 3 with sample 0").click()
    expect(page).to_have_url(f"{page.url.split('/compare')[0]}/compare?a=repair-tree.0&b=repair-tree.3")
    shared = page.get_by_role("button", name="They part after 5 calls that both share, token for token")
    expect(page.locator("section .pair")).to_have_count(1)
    expect(page.locator("section .pair")).to_contain_text("I could not repair it")
    shared.click()
    expect(page.locator("section .pair")).to_have_count(6)
    shared.click()
    expect(page.locator("section .pair")).to_have_count(1)


def test_a_session_says_what_it_shares_and_with_whom(reader: Opens) -> None:
    someone = reader()
    page = someone.open("/sessions/repair-tree.3", "[data-part=call] .message")
    origin = page.get_by_role("region", name="Origin")
    expect(origin).to_contain_text("A branch of repair-tree.0, which it leaves after 5 calls.")
    expect(origin.get_by_text("Calls replayed").locator("..")).to_have_text("Calls replayed5")
    expect(page.get_by_role("link", name="Compare with sample 0")).to_be_visible()
    tree = page.get_by_role("navigation", name="Model calls")
    assert tree.get_by_text("replayed").count() == 5
    expect(page.locator("[data-part=call]").get_by_text("replayed from repair-tree.0")).to_be_visible()
    origin.get_by_role("link", name="repair-tree.0").click()
    expect(page.locator("main h1")).to_have_text("repair-tree.0")
    left = page.get_by_role("region", name="Origin").get_by_text("Left after 1 call").locator("..")
    expect(left).to_have_text("Left after 1 callbranch 1, branch 2")


def test_a_divergence_is_shown_as_a_diff(reader: Opens) -> None:
    page = reader().open("/sessions/repair-tree.5", ".diff")
    origin = page.get_by_role("region", name="Origin")
    expect(origin).to_contain_text("A branch of repair-tree.2, which it was to leave after 6 calls.")
    told = origin.get_by_role("button", name="Model call 5 is not the recorded one: the model answered it")
    expect(origin.locator(".diff .bad")).to_have_text(f"-{HOSTILE} and it works\n")
    expect(origin.locator(".diff .good")).to_have_text(f"+{HOSTILE}\n")
    told.click()
    expect(origin.locator(".diff")).to_have_count(0)


def test_replays_and_resumed_sessions_say_so(run: Fleet, reader: Opens) -> None:
    async def replays() -> list[str]:
        return [session.id async for session in run.running.client.sessions() if "-replay-" in session.id]

    (replay,) = run.do(replays())
    someone = reader()
    page = someone.open(f"/sessions/{replay}", "[data-part=call] .message")
    expect(page.get_by_role("region", name="Origin")).to_contain_text("Replays repair-tree.1.")

    def resumed(route: Route) -> None:
        detail = route.fetch().json()
        report = {**detail["session"]["result"]["replay"], "origin": detail["session"]["id"]}
        detail["session"] |= {"origin": None, "attempt": 2}
        detail["session"]["result"]["replay"] = report
        route.fulfill(json=detail)

    page.route("**/dashboard/sessions/repair-tree.3", resumed)
    page = someone.open("/sessions/repair-tree.3", "[data-part=call] .message")
    origin = page.get_by_role("region", name="Origin")
    expect(origin).to_contain_text("Attempt 2 went on from what an earlier one had recorded.")
