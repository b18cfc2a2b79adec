"""Writes the screenshots of docs/dashboard.md from a small run, and from the numbers of a published training.

PYTHONPATH=. .venv/bin/python tools/screenshots.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright

from polar.models.task import Run, RunKind
from polar.models.views import RunStep
from tests.browser import chromium
from tests.dashboards import fleet

OUT = Path(__file__).parents[1] / "docs" / "images"
SEEDS = sorted((OUT.parent / "results" / "learning").glob("seed-[0-9].jsonl"))
WIDE, NARROW = (1280, 860), (390, 844)
SHOTS = (
    ("overview", "/", "[data-stage=ended]", "light", WIDE),
    ("group", "/tasks/repair-app", "tbody tr", "light", WIDE),
    ("tree", "/tasks/repair-tree", ".branches", "light", WIDE),
    ("conversation", "/sessions/repair-app.0?view=conversation&call=1", ".message", "light", WIDE),
    ("tokens", "/sessions/repair-app.0?view=tokens&colour=logprob", ".tokens span", "dark", WIDE),
    ("compare", "/compare?a=repair-app.0&b=repair-app.1", ".pair .call", "light", WIDE),
    ("runs", "/runs", "tbody tr", "light", WIDE),
    ("training", "/runs/learning-seed-0?with=learning-seed-1&smooth=0.6", ".compared li", "dark", WIDE),
    ("narrow", "/sessions", "tbody tr", "light", NARROW),
)
"""Name, path, an element that appears with the data, theme, size."""


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as data_dir,
        fleet(Path(data_dir)) as run,
        sync_playwright() as playwright,
    ):
        for seed in SEEDS:
            steps = [json.loads(line) for line in seed.read_text().splitlines()]
            named = Run(name=f"learning-{seed.stem}", kind=RunKind.TRAINING)
            run.report(named, [RunStep(step=one.pop("step"), numbers=one) for one in steps])
        browser = chromium.launch(playwright)
        for name, address, part, theme, (width, height) in SHOTS:
            size: ViewportSize = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme="dark" if theme == "dark" else "light")
            page.goto(f"{run.url}/#token={run.reader}")
            page.wait_for_selector("main h1")
            page.goto(run.url + address)
            page.wait_for_selector(part)
            page.wait_for_load_state("load")
            page.screenshot(path=OUT / f"dashboard-{name}.png", full_page=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
