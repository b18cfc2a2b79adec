"""What Codex is told, without running it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.assets.cache import asset
from polar.config import plugins
from polar.errors import InvalidInput
from polar.harnesses.codex import CODEX, VERSION, Codex
from polar.models.component import Component
from tests.fakes.harness_context import harness_context

CONTEXT = harness_context({CODEX: "/c"}, instruction="-do it", model="policy/small")
STATE = PurePosixPath("/home/agent/.codex")


@pytest.fixture(autouse=True)
def known_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Codex left it in the cache when it was first asked."""
    known = {"slug": "known", "base_instructions": "Codex's own.", "apply_patch_tool_type": "freeform"}
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    left = asset(f"codex-model-{VERSION}", lambda _into: None)
    (left / "model.json").write_text(json.dumps(known))


def documents(harness: Codex) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the one model of the catalog."""
    files = harness.files(CONTEXT)
    config = tomllib.loads(files[STATE / "config.toml"].decode())
    (model,) = json.loads(files[PurePosixPath(config["model_catalog_json"])])["models"]
    return config, model


def test_command_is_headless_and_reads_the_instruction_from_stdin() -> None:
    command = Codex(Codex.Options()).command(CONTEXT)
    assert command.argv[:2] == ("/c/bin/codex", "exec")
    assert command.argv[-1] == "-"
    assert "--dangerously-bypass-approvals-and-sandbox" in command.argv
    assert command.stdin == b"-do it"
    assert command.env["CODEX_HOME"] == str(STATE)


def test_served_model_is_described_after_a_known_one() -> None:
    config, model = documents(Codex(Codex.Options()))
    assert config["model"] == model["slug"] == "policy/small"
    assert model["context_window"] == model["max_context_window"] == 8192
    assert model["apply_patch_tool_type"] == "freeform"
    assert model["base_instructions"] == "Codex's own."
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:1234/v1"
    assert provider["wire_api"] == "responses"


def test_nothing_but_the_gateway_is_called() -> None:
    config, _ = documents(Codex(Codex.Options()))
    assert config["check_for_update_on_startup"] is False
    assert config["analytics"]["enabled"] is config["feedback"]["enabled"] is False
    assert config["web_search"] == "disabled"
    assert not any(config["features"].values())


def test_codex_key_is_only_in_the_environment() -> None:
    harness = Codex(Codex.Options())
    command = harness.command(CONTEXT)
    assert command.env["POLAR_KEY"] == "secret"
    assert not any("secret" in argument for argument in command.argv)
    assert not any(b"secret" in data for data in harness.files(CONTEXT).values())


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_survives_the_configuration(text: str) -> None:
    config, model = documents(Codex(Codex.Options(system_prompt=text, append_system_prompt=text)))
    assert config["developer_instructions"] == model["base_instructions"] == text


@pytest.mark.parametrize(
    ("options", "field"), [({"effort": "hard"}, "effort"), ({"retries": -1}, "retries"), ({"x": 1}, "x")]
)
def test_bad_codex_options_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"harness\.options\.{field}"):
        plugins.create("harnesses", "harness", Component(name="codex", options=options))
