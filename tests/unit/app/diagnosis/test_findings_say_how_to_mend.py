"""Each check finds what is wrong where something is, and says what to do."""

from __future__ import annotations

import importlib.util
import resource
import socket
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from polar.app import doctor, stack
from polar.app.doctor import Finding, Severity, drift
from polar.assets.cache import asset, without_making
from polar.config import plugins
from polar.config.settings import DEFAULT_MODEL, EngineSettings, NodeSettings, ServerSettings, Settings
from polar.engines.embedded.weights import ensure_model
from polar.errors import NotInstalled
from tests.fakes import sglang_wire
from tests.fakes.vllm_wire import ANSWER, vllm_wire
from tests.tokenizers_of_families import DEEPSEEK, LLAMA


def named(found: Iterable[Finding], name: str) -> Finding:
    return next(finding for finding in found if finding.name == name)


def test_a_port_in_use_is_a_problem_and_our_own_server_is_not(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = Settings(data_dir=tmp_path, server=ServerSettings(port=port))
        finding = named(doctor.machine_findings(settings), "server port")
        assert (finding.level, "server.port" in (finding.fix or "")) == (Severity.PROBLEM, True)
        (tmp_path / "server.json").write_text(f'{{"url": "http://127.0.0.1:{port}"}}')
        assert named(doctor.machine_findings(settings), "server port").level is Severity.OK


def test_settings_that_are_wrong_are_named_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    file = tmp_path / "polar.yaml"
    file.write_text("node: {run_slot: 4}\n")
    settings, finding = doctor.check_settings(file)
    assert finding.level is Severity.PROBLEM
    assert "node.run_slot" in finding.detail
    assert settings == Settings()


@pytest.mark.parametrize(
    ("least", "enough", "level"),
    [(2.0, 2.0, Severity.PROBLEM), (0.5, 2.0, Severity.WARNING), (0.5, 0.5, Severity.OK)],
)
def test_memory_is_judged_by_what_is_free(
    monkeypatch: pytest.MonkeyPatch, least: float, enough: float, level: Severity
) -> None:
    free = psutil.virtual_memory().available
    monkeypatch.setattr(doctor, "LEAST_MEMORY", least * free)
    monkeypatch.setattr(doctor, "ENOUGH_MEMORY", enough * free)
    finding = named(doctor.machine_findings(Settings()), "memory")
    assert (finding.level, finding.fix is None) == (level, level is Severity.OK)


@pytest.mark.parametrize(
    ("limit", "level"),
    [(1024, Severity.WARNING), (65_536, Severity.OK), (resource.RLIM_INFINITY, Severity.OK)],
)
def test_open_files_are_judged(monkeypatch: pytest.MonkeyPatch, limit: int, level: Severity) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (limit, limit))
    assert named(doctor.machine_findings(Settings()), "open files").level is level


def test_an_engine_that_is_named_needs_no_torch_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    finding = named(doctor.machine_findings(Settings(data_dir=tmp_path)), "embedded engine")
    assert (finding.level, "polar-rl[engine]" in (finding.fix or "")) == (Severity.PROBLEM, True)
    named_engine = Settings(data_dir=tmp_path, engine=EngineSettings(url="http://gpu:8000"))
    assert "embedded engine" not in {found.name for found in doctor.machine_findings(named_engine)}


async def test_a_runtime_that_is_wanted_and_does_not_work_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        @classmethod
        async def unavailable(cls) -> str | None:
            return "no user namespaces"

    monkeypatch.setattr(plugins, "names", lambda _kind: ("broken",))
    monkeypatch.setattr(plugins, "load", lambda _kind, _name: Broken)
    (wanted,) = [found async for found in doctor.sandbox_findings(NodeSettings(runtimes=("broken",)))]
    (unwanted,) = [found async for found in doctor.sandbox_findings(NodeSettings(runtimes=("process",)))]
    assert (wanted.level, wanted.detail) == (Severity.PROBLEM, "no user namespaces")
    assert unwanted.level is Severity.WARNING
    assert all("node.runtimes" in (found.fix or "") for found in (wanted, unwanted))


@pytest.mark.parametrize(("how", "level"), [("cgroup v2", Severity.OK), ("watched", Severity.WARNING)])
async def test_bounds_that_are_only_watched_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, how: str, level: Severity
) -> None:
    class Bounded:
        @classmethod
        async def unavailable(cls) -> str | None:
            return None

        @classmethod
        async def enforcement(cls) -> dict[str, str]:
            return {"memory": how, "disk": "ext4 image"}

    monkeypatch.setattr(plugins, "names", lambda _kind: ("x",))
    monkeypatch.setattr(plugins, "load", lambda _kind, _name: Bounded)
    _, bounds = [found async for found in doctor.sandbox_findings(NodeSettings(runtimes=("x",)))]
    assert (bounds.level, "control group" in (bounds.fix or "")) == (level, level is Severity.WARNING)


async def test_harnesses_are_looked_for_and_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path / "empty"))
    found = {finding.name: finding async for finding in doctor.findings(Settings())}
    assert found["pi"].level is Severity.WARNING
    assert "first" in (found["pi"].fix or "")
    assert found["shell"].level is Severity.OK
    assert not (tmp_path / "empty").exists()


def test_without_making_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    with without_making(), pytest.raises(NotInstalled, match="thing-1"):
        asset("thing-1", lambda _into: None)
    assert asset("thing-1", lambda _into: None).is_dir()
    with without_making():
        assert asset("thing-1", lambda _into: None).is_dir()


def test_drift_is_told_by_where_it_begins() -> None:
    tokenizer = Tokenizer.from_file(str(ensure_model(DEFAULT_MODEL) / "tokenizer.json"))
    ids = tokenizer.encode("hello world", add_special_tokens=False).ids
    assert "none" in drift(ids, tokenizer).detail
    vocabulary = tokenizer.get_vocab()
    letters = [vocabulary[letter] for letter in "hello"]
    assert "from token 0:" in drift(letters, tokenizer).detail


async def test_an_engine_that_cannot_be_reached_is_a_problem_with_a_way_out() -> None:
    settings = Settings(engine=EngineSettings(url="http://127.0.0.1:9"))
    (finding,) = [found async for found in doctor.engine_findings(settings, lambda _step: None)]
    assert (finding.level, finding.name) == (Severity.PROBLEM, "reachable")
    assert finding.fix


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({}, "mode tokens: template (the model's own chat template"),
        ({"renderer": "template"}, "mode tokens: template (set by engine.renderer"),
        ({"mode": "chat"}, "mode chat (set by engine.mode); tokens mode would use template"),
    ],
)
async def test_the_renderer_is_told_with_why_it_was_chosen_and_how_calls_are_read(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, str], told: str
) -> None:
    monkeypatch.setattr(stack, "ensure_tokenizer", lambda _name: LLAMA.directory())
    async with vllm_wire(ANSWER) as wire:
        settings = Settings(engine=EngineSettings.model_validate({"url": wire.url, **engine}))
        found = [finding async for finding in doctor.engine_findings(settings, lambda _step: None)]
    # Where the engine renders, it matters to nobody.
    is_compared = "tokenizer" in [finding.name for finding in found]
    assert is_compared is (engine.get("mode") != "chat")
    renderer = named(found, "renderer").detail
    assert renderer.startswith(told)
    assert "calls: json" in renderer
    assert f"tokenizers {version('tokenizers')}" in named(found, "versions").detail


@pytest.mark.parametrize(
    ("engine", "level", "told"),
    [
        ({}, Severity.WARNING, "none, so the mode is chat: model small: it has no chat"),
        ({"mode": "tokens"}, Severity.PROBLEM, "none, so nothing starts: model small: it has no chat"),
        ({"mode": "chat"}, Severity.OK, "mode chat (set by engine.mode); tokens mode has none: model small"),
        ({"renderer": "mistral"}, Severity.PROBLEM, "none, so nothing starts: engine.renderer: mistral is"),
        ({"tool_form": "hermess"}, Severity.PROBLEM, "none, so nothing starts: engine."),
        ({"model": "typo"}, Severity.PROBLEM, "none, so nothing starts: model typo: no such directory"),
    ],
    ids=str,
)
async def test_a_model_without_a_renderer_is_told_as_the_server_takes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: dict[str, str], level: Severity, told: str
) -> None:
    def directory(name: str) -> Path:
        if name == "typo":
            raise NotInstalled(f"model {name}: no such directory")
        return tmp_path

    (tmp_path / "tokenizer.json").symlink_to(LLAMA.directory() / "tokenizer.json")
    monkeypatch.setattr(stack, "ensure_tokenizer", directory)
    async with vllm_wire(ANSWER) as wire:
        settings = Settings(engine=EngineSettings.model_validate({"url": wire.url, **engine}))
        found = [finding async for finding in doctor.engine_findings(settings, lambda _step: None)]
    renderer = named(found, "renderer")
    assert (renderer.level, renderer.detail[: len(told)]) == (level, told)
    assert bool(renderer.fix) is (level is not Severity.OK and "model" not in engine)


@pytest.mark.parametrize(
    ("logits", "counts_temperature", "level", "told"),
    [
        ({"a": 3.0, "b": 1.0}, True, Severity.OK, "from the distribution that tokens are sampled from"),
        ({"a": 3.0, "b": 1.0}, False, Severity.WARNING, "computed before temperature"),
        ({"a": 500.0, "b": 0.0}, False, Severity.WARNING, "from an unknown distribution"),
    ],
    ids=["processed", "raw", "unknown"],
)
async def test_logprobs_that_temperature_does_not_count_in_are_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    logits: dict[str, float],
    counts_temperature: bool,
    level: Severity,
    told: str,
) -> None:
    monkeypatch.setattr(stack, "ensure_tokenizer", lambda _name: LLAMA.directory())
    async with vllm_wire(ANSWER) as wire:
        wire.logits, wire.counts_temperature = logits, counts_temperature
        settings = Settings(engine=EngineSettings(url=wire.url))
        found = [finding async for finding in doctor.engine_findings(settings, lambda _step: None)]
    logprobs = named(found, "logprobs")
    assert (logprobs.level, logprobs.detail.partition(":")[0]) == (level, told)
    assert ("--logprobs-mode processed_logprobs" in (logprobs.fix or "")) is (level is Severity.WARNING)


@pytest.mark.parametrize("is_old", [False, True])
async def test_the_version_of_an_engine_that_wants_a_key_is_told(is_old: bool) -> None:
    async with sglang_wire.sglang_wire(sglang_wire.ANSWER, is_old=is_old, key="sk-1") as wire:
        settings = Settings(engine=EngineSettings(url=wire.url, kind="sglang", api_key="sk-1"))
        found = [finding async for finding in doctor.engine_findings(settings, lambda _step: None)]
    assert "sglang 0.5.12" in named(found, "versions").detail


async def test_a_family_that_is_only_near_the_template_is_not_said_to_be_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stack, "ensure_tokenizer", lambda _name: DEEPSEEK.directory())
    async with vllm_wire(ANSWER) as wire:
        settings = Settings(engine=EngineSettings(url=wire.url))
        found = [finding async for finding in doctor.engine_findings(settings, lambda _step: None)]
    assert named(found, "renderer").detail.startswith(
        "mode tokens: deepseek-v3 (of the package renderers, the nearest to the model's chat template); "
    )
