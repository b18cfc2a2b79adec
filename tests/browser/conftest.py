"""A browser, and one real run that all of its pages show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from polar.assets.cache import asset
from polar.assets.node import unpack_npm
from tests.browser import chromium
from tests.dashboards import WIDE, Fleet, fleet
from tests.systems import TOKEN

AXE = "4.14.0"
AXE_INTEGRITY = (
    "sha512-9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ=="
)

expect.set_options(timeout=30_000)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("dashboard")) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed with its module: while it is open this thread has a running event loop, and no test its own."""
    if not chromium.is_there():
        pytest.skip("no browser is packaged for this platform: install Chromium to test the dashboard")
    with sync_playwright() as playwright:
        opened = chromium.launch(playwright)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The accessibility checker's source."""
    make = partial(unpack_npm, "axe-core", AXE, AXE_INTEGRITY)
    return (asset(f"axe-core-{AXE}", make) / "axe.min.js").read_text()


@dataclass
class Reader:
    """Somebody who reads the dashboard; whatever goes wrong in the page is remembered."""

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)

    def open(self, address: str, wait_for: str = "main h1") -> Page:
        self.page.goto(self.url + address)
        self.page.wait_for_selector(wait_for)
        return self.page


@pytest.fixture
def reader(browser: Browser, run: Fleet) -> Iterator[Callable[..., Reader]]:
    """Opens pages with a token that reads; a test that left an error in the console has failed."""
    opened: list[Reader] = []

    def open_reader(*, width: int = WIDE, theme: str = "light", token: str | None = None) -> Reader:
        options: dict[str, Any] = {"viewport": {"width": width, "height": 900}, "color_scheme": theme}
        page = browser.new_context(**options).new_page()
        made = Reader(page, run.url)

        def remember(said: ConsoleMessage) -> None:
            if said.type == "error":
                made.problems.append(said.text)

        page.on("console", remember)
        page.on("pageerror", lambda error: made.problems.append(str(error)))
        page.goto(f"{run.url}/#token={token or run.reader}")
        page.wait_for_selector("main h1")
        opened.append(made)
        return made

    yield open_reader
    for made in opened:
        made.page.context.close()
    assert [problem for made in opened for problem in made.problems] == []


@pytest.fixture(scope="session")
def admin_token() -> str:
    return TOKEN
