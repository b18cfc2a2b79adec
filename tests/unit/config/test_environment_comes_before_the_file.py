"""What an environment variable says comes before what the settings file says."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from polar.config.settings import Settings, load_settings


@pytest.mark.parametrize(
    ("variable", "path", "values"),
    [
        ("POLAR_DATABASE_URL", ("server", "database_url"), ("file://", "environment://", "asked://")),
        ("POLAR_WEBHOOK_SECRET", ("server", "webhooks", "secret"), ("f" * 16, "e" * 16, "a" * 16)),
        ("POLAR_ENGINE_KEY", ("engine", "api_key"), ("sk-file", "sk-environment", "sk-asked")),
        ("POLAR_METRICS_TOKEN", ("telemetry", "metrics_token"), ("f" * 16, "e" * 16, "a" * 16)),
        ("POLAR_OTEL", ("telemetry", "traces"), ("http://file", "http://environment", "off")),
        ("POLAR_LOG_FORMAT", ("log_format",), ("console", "json", "console")),
    ],
)
def test_a_variable_comes_before_the_file_and_after_what_is_asked_for(
    variable: str,
    path: tuple[str, ...],
    values: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, environment, asked = values
    written = tmp_path / "polar.yaml"
    written.write_text(yaml.safe_dump(nested(path, file)))
    monkeypatch.delenv(variable, raising=False)
    assert found(path, load_settings(written)) == file
    monkeypatch.setenv(variable, environment)
    assert found(path, load_settings(written)) == environment
    assert found(path, load_settings(written, nested(path, asked))) == asked


def found(path: tuple[str, ...], settings: Settings) -> Any:
    return attrgetter(".".join(path))(settings)


def nested(path: tuple[str, ...], value: str) -> dict[str, Any]:
    document: Any = value
    for key in reversed(path):
        document = {key: document}
    return dict(document)
