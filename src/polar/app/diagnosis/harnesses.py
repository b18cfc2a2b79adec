"""Harnesses: which are fetched, in which version."""

from __future__ import annotations

from collections.abc import AsyncIterator

from polar import plugins
from polar.app.diagnosis.finding import Area, Finding
from polar.assets.cache import without_making
from polar.errors import NotInstalled, PolarError
from polar.harnesses.base import Harness
from polar.models.component import Component

AREA = Area("harnesses")
_FETCHED = "nothing, if PyPI and npm's registry can be reached when a task names it first"


async def findings() -> AsyncIterator[Finding]:
    for name in plugins.names("harnesses"):
        yield await _finding(name)


async def _finding(name: str) -> Finding:
    try:
        harness: Harness = plugins.create("harnesses", "harness", Component(name=name))
    except PolarError as error:
        # Some harnesses have options without which they mean nothing.
        return AREA.ok(name, f"needs options in the task: {error.message}")
    try:
        with without_making():
            installation = await harness.install()
    except NotInstalled as error:
        return AREA.warning(name, error.message, error.hint and _FETCHED)
    except PolarError as error:
        return AREA.problem(name, error.message, error.hint)
    return AREA.ok(name, installation.version)
