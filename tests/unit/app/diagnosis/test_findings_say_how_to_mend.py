"""Each check finds what is wrong where something is, and says what to do."""

from __future__ import annotations

import importlib.util
import resource
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.app import doctor
from polar.app.doctor import Finding, Severity, drift
from polar.assets.cache import asset, without_making
from polar.config import plugins
from polar.config.settings import DEFAULT_MODEL, EngineSettings, NodeSettings, ServerSettings, Settings
from polar.engines.embedded.weights import ensure_model
from polar.errors import NotInstalled
from polar.rendering.families import renderer_for
from tests.tokenizers_of_families import LLAMA


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
    settings, finding = doctor.settings_found(file)
    assert finding.level is Severity.PROBLEM
    assert "node.run_slot" in finding.detail
    assert settings == Settings()


@pytest.mark.parametrize(
    ("kilobytes", "level"),
    [(100 << 10, Severity.PROBLEM), (1 << 20, Severity.WARNING), (8 << 20, Severity.OK)],
)
def test_memory_is_judged_by_what_is_free(tmp_path: Path, kilobytes: int, level: Severity) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {kilobytes} kB\n")
    finding = doctor._memory(meminfo)
    assert (finding.level, finding.fix is None) == (level, level is Severity.OK)


@pytest.mark.parametrize(
    ("limit", "level"),
    [(1024, Severity.WARNING), (65_536, Severity.OK), (resource.RLIM_INFINITY, Severity.OK)],
)
def test_open_files_are_judged(limit: int, level: Severity) -> None:
    assert doctor._open_files(limit).level is level


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


def test_bounds_that_are_only_watched_are_a_warning() -> None:
    assert doctor._bounds("x", {"memory": "cgroup v2", "disk": "ext4 image"}).level is Severity.OK
    weak = doctor._bounds("x", {"memory": "watched", "disk": "ext4 image"})
    assert (weak.level, "control group" in (weak.fix or "")) == (Severity.WARNING, True)


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
    assert "from token 0 on" in drift(letters, tokenizer).detail


async def test_an_engine_that_cannot_be_reached_is_a_problem_with_a_way_out() -> None:
    settings = Settings(engine=EngineSettings(url="http://127.0.0.1:9"))
    (finding,) = [found async for found in doctor.engine_findings(settings, lambda _step: None)]
    assert (finding.level, finding.name) == (Severity.PROBLEM, "reachable")
    assert finding.fix


def test_the_renderer_is_told_with_why_it_was_chosen_and_how_calls_are_read() -> None:
    renderer = renderer_for("x", LLAMA.directory(), family="template")
    told = doctor._chosen(EngineSettings(), renderer)
    assert told.startswith("mode tokens: template (the model's own chat template")
    assert "calls: json" in told
    assert "as engine.renderer says" in doctor._chosen(EngineSettings(renderer="template"), renderer)
    assert doctor._chosen(EngineSettings(mode="chat"), renderer).startswith("mode chat")


async def test_versions_are_those_of_the_packages_that_render() -> None:
    finding = await doctor._versions(Settings(engine=EngineSettings(url="http://127.0.0.1:9")))
    assert "tokenizers " in finding.detail
