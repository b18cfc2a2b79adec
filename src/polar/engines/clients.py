"""The client of the engines that the settings name."""

from __future__ import annotations

from collections.abc import Sequence

from polar import plugins
from polar.config.settings import EngineSettings
from polar.engines.base import Engine
from polar.engines.replicas import Replicas


def engine_client(settings: EngineSettings, urls: Sequence[str]) -> Engine:
    """The client of the one engine, or of all replicas as if they were one."""
    client = plugins.load("engines", settings.kind)
    named = settings.model if "model" in settings.model_fields_set else None
    engines: dict[str, Engine] = {
        url: client(url, settings.api_key, model=named, max_context=settings.max_context) for url in urls
    }
    return engines[urls[0]] if len(urls) == 1 else Replicas(engines)
