"""The dashboard in a real browser, with what a real run left: every page, and what is on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from polar.models.session import SessionStatus
from tests.dashboards import HOSTILE, NARROW, WIDE, Fleet, repair_task, waiting_task

pytestmark = pytest.mark.xdist_group("browser")

Opens = Callable[..., Any]

PAGES = {
    "/": "main [data-stage=ended]",
    "/tasks": "main tbody tr",
    "/tasks/repair-app": "main tbody tr",
    "/tasks/repair-tree": ".branches li",
    "/sessions": "main tbody tr",
    "/sessions/repair-app.0": "[data-part=call] .message",
    "/sessions/repair-app.0?view=tokens": ".tokens span",
    "/sessions/repair-app.0?view=artifacts": "main tbody tr",
    "/sessions/repair-app.0?view=report": "main tbody tr",
    "/sessions/repair-tree.5": ".diff",
    "/compare?a=repair-app.0&b=repair-app.1": ".pair .call",
    "/compare?a=repair-tree.3&b=repair-tree.4": ".shared button",
    "/runs": "main tbody tr",
    "/runs/grpo-small": ".chart .line",
    "/runs/grpo-small?with=grpo-slow&smooth=0.6": ".compared li",
    "/runs/unnamed": ".facts",
    "/tasks?run=grpo-small&step=60": "main tbody tr",
    "/sessions?run=grpo-small&reward_min=0.5": "main tbody tr",
}
"""Address → what is there once its data is."""

SERIOUS = """async () => (await axe.run()).violations
  .filter(one => ["serious", "critical"].includes(one.impact))
  .map(one => `${one.id}: ${one.nodes.map(node => node.target.join(" ")).join(", ")}`)"""


@pytest.mark.parametrize(("theme", "width"), [("light", WIDE), ("dark", NARROW)])
def test_every_page_is_accessible_and_fits(theme: str, width: int, reader: Opens, axe: str) -> None:
    someone = reader(width=width, theme=theme)
    for address, part in PAGES.items():
        page = someone.open(address, part)
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{address} is too wide"
        page.evaluate(axe)
        assert page.evaluate(SERIOUS) == [], address


def test_overview_counts_what_happened(run: Fleet, reader: Opens) -> None:
    page = reader().open("/")
    counted = run.do(run.running.client.health()).sessions
    ended = sum(count for status, count in counted.items() if status.ended)
    expect(page.locator("[data-stage=ended] .count")).to_have_text(str(ended))
    # A replay samples nothing, so there is nothing in it to learn from.
    usable = round(100 * (counted[SessionStatus.COMPLETED] - 1) / ended)
    expect(page.locator("[data-figure=acceptance] .value")).to_have_text(f"{usable} % of {ended} in an hour")
    expect(page.get_by_role("row", name="local")).to_contain_text("running")
    expect(page.get_by_role("row", name="local")).to_contain_text("in step")
    expect(page.locator("main .head")).to_contain_text("policy version 1")


def test_group_shows_rewards_and_advantages(reader: Opens) -> None:
    page = reader().open("/tasks/repair-app", "main tbody tr")
    expect(page.get_by_text("4 of 4 scored · mean 0.5 · standard deviation 0.5")).to_be_visible()
    rows = page.get_by_role("table", name="Samples").locator("tbody tr")
    assert rows.count() == 4
    found = {tuple(row.locator("td").nth(at).inner_text() for at in (3, 4)) for row in rows.all()}
    assert found == {("1", "+1.00"), ("0", "−1.00")}


def test_two_samples_are_compared_from_the_group(reader: Opens) -> None:
    page = reader().open("/tasks/repair-app", "main tbody tr")
    for sample in (0, 1):
        page.get_by_label(f"Choose repair-app.{sample}").check()
    page.get_by_role("button", name="Compare the two chosen").click()
    expect(page).to_have_url(f"{page.url.split('/compare')[0]}/compare?a=repair-app.0&b=repair-app.1")
    expect(page.get_by_text("the same on both sides").first).to_be_visible()
    expect(page.get_by_text("I could not repair it")).to_be_visible()


def test_conversation_is_the_tree_that_the_agent_led(reader: Opens) -> None:
    page = reader().open("/sessions/repair-app.0", "[data-part=call] .message")
    tree = page.get_by_role("navigation", name="Model calls")
    assert [heading.inner_text() for heading in tree.locator("h3").all()] == [
        "Main conversation",
        "Side call",
        "Sub-agent",
    ]
    expect(tree.get_by_text("goes on from call 0")).to_be_visible()
    tree.get_by_role("button").nth(1).click()
    expect(page).to_have_url(f"{page.url.split('?')[0]}?view=conversation&call=1")
    call = page.locator("[data-part=call]")
    expect(call.get_by_text("app.py test_app.py README.md")).to_be_visible()
    expect(call.locator(".call")).to_contain_text("sed -n 1,20p app.py")
    expect(call.get_by_text("continues call 0: clean")).to_be_visible()


def test_what_an_agent_writes_is_never_markup(reader: Opens) -> None:
    someone = reader()
    for address in (
        "/sessions/repair-app.0?view=conversation&call=5",
        "/sessions/repair-app.0?view=tokens",
        "/sessions/repair-app.0?view=artifacts&file=files/answer.txt",
        "/compare?a=repair-app.0&b=repair-app.1",
        "/sessions/repair-tree.5",
    ):
        page = someone.open(address)
        expect(page.locator("main")).to_contain_text("onerror=" if "tokens" in address else HOSTILE)
        assert page.evaluate("window.owned") is None
        assert page.locator("main b", has_text="bold").count() == 0
        assert page.locator("main img, main script").count() == 0


def test_tokens_add_up_and_tell_what_they_are(reader: Opens) -> None:
    page = reader().open("/sessions/repair-app.0?view=tokens", ".tokens span")
    expect(page.locator("[data-part=sums]")).to_contain_text("✓ adds up")
    answer = page.locator("[data-segment].sampled").first
    expect(answer.locator(".tokens")).to_contain_text("I look at the files first.")
    token = answer.locator(".tokens span").first
    expect(token).to_have_class("t-trained")
    token.hover()
    tip = page.locator("#token-tip")
    expect(tip).to_contain_text("logprob")
    expect(tip).to_contain_text("in trace 0")
    page.get_by_text("logprob", exact=True).first.click()
    expect(page).to_have_url(f"{page.url.split('?')[0]}?view=tokens&path=0&colour=logprob")
    expect(answer.locator(".tokens span").first).to_have_attribute("class", "t-p2")
    page.get_by_text("version", exact=True).first.click()
    expect(answer.locator(".tokens span").first).to_have_attribute("class", "t-v0")


def test_prompt_is_folded_until_it_is_asked_for(reader: Opens) -> None:
    page = reader().open("/sessions/repair-app.0?view=tokens", ".tokens span")
    prompt = page.locator("[data-segment]").first
    assert prompt.locator(".tokens span").count() == 0
    prompt.get_by_role("button").click()
    expect(prompt.locator(".tokens")).to_contain_text("You repair small programs.")
    expect(prompt.locator(".tokens span").first).to_have_class("t-left-out")


def test_forks_lead_to_the_other_way_on(reader: Opens) -> None:
    page = reader().open("/sessions/repair-app.0?view=tokens", ".tokens span")
    fork = page.locator(".fork button").first
    other = fork.inner_text()
    fork.click()
    chosen = page.locator("select[name=path]")
    assert chosen.locator("option:checked").inner_text() == other
    expect(page.locator("[data-part=sequence]")).to_contain_text("cat README.md")


def test_tokens_are_walked_through_with_the_keyboard(reader: Opens) -> None:
    page = reader().open("/sessions/repair-app.0?view=tokens", ".tokens span")
    page.locator("[data-part=sequence]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tokens span.at")).to_have_text(" look")
    expect(page.locator("#token-tip")).to_contain_text("position")


def test_a_session_appears_and_ends_without_a_reload(run: Fleet, reader: Opens) -> None:
    overview, listing = reader().open("/"), reader().open("/sessions?text=live")
    expect(listing.get_by_text("No session matches.")).to_be_visible()
    before = int(overview.locator("[data-stage=ended] .count").inner_text())
    run.do(run.running.client.submit(waiting_task("live")))
    expect(overview.locator("[data-stage=running] .count")).to_have_text("1")
    expect(listing.get_by_role("row", name="live.0")).to_contain_text("running")
    session = reader().open("/sessions/live.0")
    expect(session.get_by_text("Each model call appears here once it has ended")).to_be_visible()
    run.answer_the_waiting()
    expect(listing.get_by_role("row", name="live.0")).to_contain_text("completed")
    expect(overview.locator("[data-stage=ended] .count")).to_have_text(str(before + 1))
    expect(session.locator(".head .state")).to_have_text("completed")


def test_a_running_session_shows_each_call_once_it_has_ended(run: Fleet, reader: Opens) -> None:
    early = reader()
    run.model.gate.clear()
    run.do(run.running.client.submit(repair_task("told", 1, instruction="pause at the end")))
    page = early.open("/sessions?text=told", "main tbody tr")
    page.get_by_role("link", name="told.0").click()
    calls = page.get_by_role("log", name="Model calls").locator("[data-part=call]")
    expect(calls).to_have_count(5)
    expect(calls.first).to_contain_text("pause at the end")
    expect(calls.nth(1)).to_contain_text("The test names the fault.")
    expect(page.locator(".head .state")).to_have_text("running")
    # Who comes late gets what was before.
    late = reader().open("/sessions/told.0", "[data-part=running] [data-part=call]")
    expect(late.get_by_role("log", name="Model calls").locator("[data-part=call]")).to_have_count(5)
    run.answer_the_waiting()
    expect(page.locator(".head .state")).to_have_text("completed")
    expect(page.get_by_role("navigation", name="Model calls")).to_be_visible()


def test_filters_live_in_the_address(reader: Opens) -> None:
    someone = reader()
    page = someone.open("/sessions", "main tbody tr")
    page.get_by_label("Search by id").fill("again")
    page.locator("select[name=reward]").select_option("positive")
    expect(page).to_have_url(f"{someone.url}/sessions?text=again&reward=positive")
    expect(page.locator("main tbody tr")).to_have_count(1)
    page.reload()
    expect(page.locator("main tbody tr")).to_have_count(1)
    expect(page.get_by_label("Search by id")).to_have_value("again")
    page = someone.open("/tasks?text=nowhere&status=finished")
    expect(page.get_by_text("No task matches.")).to_be_visible()


def test_keys_move_between_pages_and_lines(reader: Opens) -> None:
    someone = reader()
    page = someone.open("/")
    page.keyboard.press("g")
    page.keyboard.press("s")
    expect(page).to_have_url(f"{someone.url}/sessions")
    page.wait_for_selector("[data-page=sessions] tbody tr")
    page.keyboard.press("/")
    expect(page.get_by_label("Search by id")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator("main tbody tr").nth(1).get_by_role("link").first).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-page=session]")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


def test_theme_is_changed_and_stays(reader: Opens) -> None:
    page = reader(theme="light").open("/")
    page.get_by_role("button", name="Change to the dark theme").click()
    page.reload()
    page.wait_for_selector("main h1")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_training_run_is_a_curve_for_each_number(reader: Opens) -> None:
    page = reader().open("/runs", "main tbody tr")
    page.get_by_role("link", name="grpo-small").click()
    expect(page.get_by_role("img", name="reward over steps")).to_be_visible()
    # Those of its steps, and the mean reward over time.
    expect(page.locator(".charts .card")).to_have_count(7)
    page.get_by_role("img", name="loss over steps").hover()
    expect(page.get_by_role("img", name="loss over steps")).to_contain_text("step 2")


def test_number_that_never_changes_has_no_made_up_scale(reader: Opens) -> None:
    page = reader().open("/runs", "main tbody tr")
    page.get_by_role("link", name="grpo-small").click()
    # Its value, and which step is read.
    expect(page.get_by_role("img", name="kl over steps").locator("text")).to_have_text(["0", "step 60"])


def test_runs_are_listed_by_kind_with_what_belongs_to_them(reader: Opens) -> None:
    page = reader().open("/runs", "main tbody tr")
    row = page.get_by_role("row", name="grpo-small")
    expect(row).to_contain_text("training")
    expect(row).to_contain_text("6 of 6")
    page.get_by_label("Kind").select_option("submission")
    expect(page.get_by_role("row", name="unnamed")).to_be_visible()
    expect(page.get_by_role("row", name="grpo-small")).to_have_count(0)


def test_runs_are_compared_curve_over_curve(reader: Opens) -> None:
    someone = reader()
    page = someone.open("/runs", "main tbody tr")
    for name in ("grpo-small", "grpo-slow"):
        page.get_by_label(f"Choose {name}").check()
    page.get_by_role("button", name="Compare the chosen").click()
    expect(page).to_have_url(f"{someone.url}/runs/grpo-small?with=grpo-slow")
    expect(page.get_by_role("list", name="Runs compared").locator("li")).to_have_count(2)
    chart = page.get_by_role("img", name="reward over steps")
    expect(chart.locator("path.line")).to_have_count(2)
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] - 8, "y": box["height"] / 2})
    expect(chart).to_contain_text("step 60: 0.75 · 0.45")
    before = chart.locator("path.line").first.get_attribute("d")
    page.get_by_label("Smoothing").fill("0.9")
    expect(page).to_have_url(f"{someone.url}/runs/grpo-small?with=grpo-slow&smooth=0.9")
    assert (
        page.get_by_role("img", name="reward over steps").locator("path.line").first.get_attribute("d")
        != before
    )
    page.get_by_role("button", name="Remove grpo-slow").click()
    expect(page.get_by_role("img", name="reward over steps").locator("path.line")).to_have_count(1)


def test_a_click_is_for_the_run_whose_curve_is_next_to_it(reader: Opens) -> None:
    someone = reader()
    page = someone.open("/runs/grpo-small?with=grpo-slow", ".chart .line")
    chart = page.get_by_role("img", name="reward over steps")
    box = chart.bounding_box()
    # At the last step the slow one's curve is the lower one.
    chart.click(position={"x": box["width"] - 8, "y": 0.85 * box["height"]})
    expect(page).to_have_url(f"{someone.url}/tasks?run=grpo-slow&step=60")


def test_a_step_leads_to_its_groups_and_back(reader: Opens) -> None:
    someone = reader()
    page = someone.open("/runs/grpo-small", ".chart .line")
    chart = page.get_by_role("img", name="reward over steps")
    box = chart.bounding_box()
    chart.click(position={"x": box["width"] - 8, "y": box["height"] / 2})
    expect(page).to_have_url(f"{someone.url}/tasks?run=grpo-small&step=60")
    expect(page.locator("main .head")).to_contain_text("of grpo-small, learned from in step 60")
    expect(page.locator("main tbody tr")).to_have_count(1)
    page.get_by_role("link", name="repair-app").click()
    expect(page.locator("section[aria-label=Facts]")).to_contain_text("Step")
    page.get_by_role("link", name="repair-app.1").click()
    page.get_by_role("link", name="grpo-small").click()
    expect(page).to_have_url(f"{someone.url}/runs/grpo-small")


def test_sessions_are_filtered_by_more_than_their_id(reader: Opens) -> None:
    someone = reader()
    page = someone.open("/sessions", "main tbody tr")
    page.get_by_text("More filters").click()
    page.locator("input[name=run]").fill("grpo-small")
    page.get_by_label("Reward from").fill("0.5")
    expect(page).to_have_url(f"{someone.url}/sessions?run=grpo-small&reward_min=0.5")
    expect(page.locator("main tbody tr")).to_have_count(3)
    page.get_by_label("Policy version").fill("1")
    expect(page.locator("main tbody tr")).to_have_count(1)
    page.get_by_label("Seconds from").fill("5000")
    expect(page.get_by_text("No session matches.")).to_be_visible()
