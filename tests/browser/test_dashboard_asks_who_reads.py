"""Tokens and actions: without a token there is nothing to see, and with one that reads nothing to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.dashboards import Fleet, waiting_task

pytestmark = pytest.mark.xdist_group("browser")

Opens = Callable[..., Any]


def test_page_asks_for_a_token_once(browser: Browser, run: Fleet) -> None:
    page = browser.new_context().new_page()
    page.goto(f"{run.url}/sessions")
    page.get_by_label("Token").fill("not a token of this server")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_contain_text("does not accept this token")
    page.get_by_label("Token").fill(run.reader)
    page.get_by_role("button", name="Open").click()
    page.wait_for_selector("main tbody tr")
    page.goto(f"{run.url}/tasks")
    page.wait_for_selector("main tbody tr")
    page.context.close()


def test_token_of_a_link_leaves_the_address(run: Fleet, reader: Opens) -> None:
    page = reader().page
    expect(page).to_have_url(f"{run.url}/")
    assert page.evaluate("sessionStorage.getItem('polar-token')") == run.reader
    assert page.evaluate("localStorage.length") == 0


def test_a_link_with_a_token_opens_the_page_that_asked_for_one(browser: Browser, run: Fleet) -> None:
    page = browser.new_context().new_page()
    page.goto(f"{run.url}/sessions")
    page.get_by_label("Token").wait_for()
    page.goto(f"{run.url}/sessions#token={run.reader}")
    page.wait_for_selector("main tbody tr")
    expect(page).to_have_url(f"{run.url}/sessions")
    page.context.close()


def test_only_admins_are_offered_actions_and_are_asked_first(
    run: Fleet, reader: Opens, admin_token: str
) -> None:
    run.model.gate.clear()
    run.do(run.running.client.submit(waiting_task("unwanted")))
    assert reader().open("/").get_by_role("button", name="Pause").count() == 0
    admin = reader(token=admin_token)
    page = admin.open("/sessions/unwanted.0")
    expect(page.locator(".head .state")).to_have_text("running")
    page.get_by_role("button", name="Cancel session").click()
    page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
    expect(page.locator(".head .state")).to_have_text("running")
    page.get_by_role("button", name="Cancel session").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel session").click()
    expect(page.locator(".head .state")).to_have_text("cancelled")
    page = admin.open("/")
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.locator("main .head")).to_contain_text("paused by dashboard")
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(page.locator("main .head")).not_to_contain_text("paused")


def test_an_admin_drains_a_node_and_lets_it_work_again(run: Fleet, reader: Opens, admin_token: str) -> None:
    client = run.running.client
    run.model.gate.clear()
    run.do(client.submit(waiting_task("held")))
    watching = reader().open("/")
    expect(watching.locator("[data-stage=running]")).to_have_text("running1of 4")
    assert watching.get_by_role("button", name="Drain local").count() == 0
    page = reader(token=admin_token).open("/")
    page.get_by_role("button", name="Drain local").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    row = watching.get_by_role("row", name="local")
    expect(row).to_contain_text("draining")
    expect(row.get_by_role("cell", name="1 of 4")).to_be_visible()
    run.do(client.cancel("held"))
    expect(row).to_contain_text("drained")
    run.do(client.submit(waiting_task("next")))
    expect(watching.locator("[data-stage=queued] .count")).to_have_text("1")
    page.get_by_role("button", name="Resume local").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(row).to_contain_text("running")
    expect(watching.locator("[data-stage=running] .count")).to_have_text("1")
    run.do(client.cancel("next"))


def test_page_is_open_and_its_data_is_not(run: Fleet) -> None:
    with httpx.Client(base_url=run.url, trust_env=False) as http:
        page = http.get("/sessions/repair-app.0")
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith("default-src 'self';")
        assert "repair" not in page.text
        module = http.get("/assets/main.js")
        assert module.headers["content-type"].startswith("text/javascript")
        assert module.headers["content-security-policy"] == page.headers["content-security-policy"]
        assert http.get("/assets/../files.py").status_code == 404
        for path in ("overview", "me", "live", "sessions", "sessions/repair-app.0", "tasks", "runs/unnamed"):
            assert http.get(f"/api/v1/dashboard/{path}").status_code == 401
