"""One URL is one engine, several are replicas, and what cannot be used is refused when it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import polar.app.stack
from polar.app.stack import data_plane
from polar.cli.main import app
from polar.config.settings import EngineSettings, Settings
from polar.engines.base import EngineError
from polar.engines.replicas import engine_client
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from tests.fakes.sglang_wire import sglang_wire
from tests.fakes.vllm_wire import event, usage, vllm_wire

A, B = "http://a:8000", "https://b:8000/v1"


@pytest.mark.parametrize("url", [f"{A},{B}", f"{A}/, {B}/", [A, B]])
def test_several_urls_are_a_list_or_have_commas_between(url: Any) -> None:
    assert EngineSettings.model_validate({"url": url}).urls == (A, B)


def test_one_url_is_itself_and_none_is_the_embedded_engine() -> None:
    assert EngineSettings(url=A).urls == (A,)
    assert EngineSettings().urls == ()


@pytest.mark.parametrize(
    "url", ["localhost", f"{A},", f"{A},localhost", f"{A} {B}", f"{A},{A}/", [], [A, 1], ""]
)
def test_what_is_no_list_of_different_urls_is_refused(url: Any) -> None:
    with pytest.raises(ValidationError):
        EngineSettings.model_validate({"url": url})


async def test_replicas_are_made_of_the_named_kind() -> None:
    one = engine_client(EngineSettings(url=A, kind="sglang"), (A,))
    assert isinstance(one, SglangEngine)
    assert one.url == A
    async with sglang_wire(weight_version="2") as first, sglang_wire(weight_version="3") as second:
        urls = (first.url, second.url)
        several = engine_client(EngineSettings(url=",".join(urls), kind="sglang"), urls)
        # Both are asked in SGLang's words, and the oldest weights are those of all.
        assert (await several.model_info()).policy_version == 2
        await several.close()


def test_the_option_may_be_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Settings] = []

    def running(settings: Settings, *_: object, **__: object) -> Any:
        seen.append(settings)
        raise EngineError("far enough")

    monkeypatch.setattr(polar.app.stack, "running", running)
    for arguments in (["--engine-url", A, "--engine-url", B], []):
        CliRunner().invoke(app, ["serve", *arguments])
    assert [settings.engine.urls for settings in seen] == [(A, B), ()]


@pytest.mark.parametrize(
    "answer",
    [
        [event(None, None, "length") | {"usage": None}, usage(1), "[DONE]"],
        [{"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]}, "[DONE]"],
        [event([5], None, "length"), "[DONE]"],
    ],
    ids=["counts but names none", "too old for ids", "no logprobs"],
)
async def test_a_server_that_returns_no_ids_or_logprobs_is_refused_at_start(
    answer: list[Any], tmp_path: Path
) -> None:
    async with vllm_wire(answer) as wire:
        settings = Settings(data_dir=tmp_path, engine=EngineSettings(url=wire.url))
        with pytest.raises(EngineError, match=r"vLLM 0\.10\.2 or newer"):
            async with data_plane(settings, lambda _step: None):
                pass
        assert wire.bodies[0]["max_tokens"] == 1


async def test_a_server_that_returns_both_passes_the_check() -> None:
    async with vllm_wire([event([5], [-1.0], "length"), usage(1), "[DONE]"]) as wire:
        engine = VllmEngine(wire.url)
        await engine.check()
        await engine.close()
