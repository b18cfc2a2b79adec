"""Who renders the prompts: what the settings say, else Polar where it can, else the engine, with a word."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polar.app.proxy
import polar.app.stack
from polar.app.stack import data_plane
from polar.cli.main import app
from polar.config.settings import DEFAULT_MODEL, EngineSettings, GatewaySettings, Settings
from polar.engines.base import EngineError
from polar.engines.embedded.weights import ensure_model
from polar.engines.replicas import engine_client
from polar.engines.vllm import VllmEngine
from polar.errors import InvalidInput, NotInstalled
from polar.rendering.tokenizer import read_tokenizer
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import event, usage, vllm_wire
from tests.tokenizers_of_families import QWEN3, QWEN25, Family

SAMPLED = [event([5], [-0.5], "length"), usage(1), "[DONE]"]


async def renderer(tmp_path: Path, **engine: Any) -> str | None:
    """Which of Polar's renders the prompts; None: the engine does."""
    settings = Settings(data_dir=tmp_path, gateway=GatewaySettings(), engine=EngineSettings(**engine))
    async with data_plane(settings, lambda _step: None) as plane:
        return plane.model.renderer


async def test_chat_mode_needs_no_tokenizer(tmp_path: Path) -> None:
    async with vllm_wire(Said("h")) as wire:
        assert await renderer(tmp_path, url=wire.url, mode="chat", model="no/such/model") is None


async def test_thoughts_cannot_be_kept_where_the_engine_renders(tmp_path: Path) -> None:
    async with vllm_wire(Said("h")) as wire:
        with pytest.raises(InvalidInput, match="in chat mode, where the engine"):
            await renderer(tmp_path, url=wire.url, mode="chat", model="no/such/model", history="keep")


async def test_a_model_that_polar_has_no_renderer_for_is_asked_in_chat_mode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_for(name: str, directory: Path, **_options: bool) -> Any:
        raise InvalidInput("model small: no renderer for its chat template")

    monkeypatch.setattr(polar.app.stack, "renderer_for", none_for)
    monkeypatch.setattr(polar.app.stack, "ensure_tokenizer", lambda name: tmp_path)
    async with vllm_wire(Said("h")) as wire:
        assert await renderer(tmp_path, url=wire.url, model="small") is None
        assert "chat mode: the engine renders prompts" in caplog.text
        assert "no renderer for its chat template" in caplog.text
        with pytest.raises(InvalidInput, match="no renderer"):
            await renderer(tmp_path, url=wire.url, model="small", mode="tokens")


async def test_a_name_that_the_engine_made_up_leads_to_chat_mode_and_one_the_user_wrote_to_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Path:
        raise NotInstalled(f"model {name}: cannot be downloaded")

    monkeypatch.setattr(polar.app.stack, "ensure_tokenizer", missing)
    async with vllm_wire(Said("h")) as wire:
        with caplog.at_level(logging.WARNING):
            assert await renderer(tmp_path, url=wire.url) is None
        assert "model small: cannot be downloaded" in caplog.text
        assert "--model names its directory" in caplog.text
        with pytest.raises(NotInstalled, match="typo"):
            await renderer(tmp_path, url=wire.url, model="typo")


async def test_tokens_mode_is_taken_where_polar_has_a_renderer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unsaid(*_: object) -> None:
        return None

    monkeypatch.setattr(polar.app.stack, "ensure_tokenizer", lambda _name: ensure_model(DEFAULT_MODEL))
    monkeypatch.setattr(VllmEngine, "tokenize", unsaid)
    async with vllm_wire(SAMPLED) as wire:
        assert await renderer(tmp_path, url=wire.url, model="small") == "template"


@pytest.mark.parametrize("served", [QWEN25, QWEN3], ids=lambda family: family.name)
async def test_an_engine_that_lacks_a_control_token_of_the_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Family
) -> None:
    """Qwen2.5 and Qwen3 tokenise every text alike, but for the marks of thoughts and results."""
    of_engine = read_tokenizer(served.directory() / "tokenizer.json")

    async def tokenize(_engine: VllmEngine, text: str) -> list[int]:
        ids: list[int] = of_engine.encode(text, add_special_tokens=False).ids
        return ids

    monkeypatch.setattr(polar.app.stack, "ensure_tokenizer", lambda _name: QWEN3.directory())
    monkeypatch.setattr(VllmEngine, "tokenize", tokenize)
    async with vllm_wire(SAMPLED) as wire:
        if served is QWEN3:
            assert await renderer(tmp_path, url=wire.url, model="small") == "template"
            return
        with pytest.raises(InvalidInput, match="a different tokenizer"):
            await renderer(tmp_path, url=wire.url, model="small")


async def test_a_renderer_that_the_user_wrote_is_taken_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ensure_model(DEFAULT_MODEL)
    monkeypatch.setattr(polar.app.stack, "ensure_tokenizer", lambda name: directory)
    async with vllm_wire(SAMPLED) as wire:
        taken = await renderer(tmp_path, url=wire.url, renderer="chatml")
        assert taken is not None
        with pytest.raises(InvalidInput, match=r"engine\.renderer: .*mistral"):
            await renderer(tmp_path, url=wire.url, renderer="mistral")
        with pytest.raises(InvalidInput, match=r"engine\.tool_form: there is no hermess"):
            await renderer(tmp_path, url=wire.url, tool_form="hermess")


async def test_an_openai_engine_is_chat_mode_and_nothing_else(tmp_path: Path) -> None:
    async with vllm_wire(Said("h")) as wire:
        assert await renderer(tmp_path, url=wire.url, kind="openai", model="gpt") is None
        with pytest.raises(InvalidInput, match="does not accept tokens"):
            await renderer(tmp_path, url=wire.url, kind="openai", model="gpt", mode="tokens")


async def test_the_engine_is_shown_its_key() -> None:
    async with vllm_wire([]) as wire:
        engine = engine_client(EngineSettings(url=wire.url, api_key="sk-file"), (wire.url,))
        await engine.model_info()
        await engine.close()
    assert wire.authorization == "Bearer sk-file"


ENGINE = ("--engine-kind", "openai", "--engine-mode", "chat", "--model", "gpt")


def test_serve_and_proxy_take_kind_and_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[Settings, dict[str, Any]]] = []

    def started(settings: Settings, *_: object, **options: Any) -> Any:
        seen.append((settings, options))
        raise EngineError("far enough")

    monkeypatch.setattr(polar.app.stack, "running", started)
    monkeypatch.setattr(polar.app.proxy, "proxy_session", started)
    CliRunner().invoke(app, ["serve", "--engine-url", "http://a", *ENGINE])
    for name in ("--engine", "--engine-url"):
        CliRunner().invoke(app, ["proxy", name, "http://a", *ENGINE, "--max-seconds", "5"])
    for settings, _ in seen:
        named = settings.engine
        assert (named.url, named.kind, named.mode, named.model) == ("http://a", "openai", "chat", "gpt")
    assert [options for _, options in seen] == [{"policy": None}, *[{"max_seconds": 5.0}] * 2]


def test_a_mode_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["serve", "--engine-mode", "words"])
    assert result.exit_code == 1
    (line,) = result.output.strip().splitlines()
    assert "engine.mode" in line
