"""What is packed for a machine without a network: everything that it lacks, in parts that can be carried."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[3]


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_has_what_polar_requires_and_not_what_the_machine_brings() -> None:
    found = script("tools/offline/pack.py").closure("polar-rl", {"engine", "train"})
    assert {"pydantic", "pydantic-core", "fastapi", "starlette", "uvloop", "greenlet", "peft", "gguf"} <= set(
        found
    )
    assert not {"polar-rl", "torch", "transformers", "numpy"} & set(found)


def test_parts_are_small_and_add_up(tmp_path: Path) -> None:
    pack = script("tools/offline/pack.py")
    contents = {"model.gguf": bytes(range(250)) * 10, "wheels/a-1.whl": b"a", "node.tar.xz": b"n" * 700}
    for name, data in contents.items():
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(data)
    pack.split(tmp_path / "files", tmp_path, 800)
    parts = sorted(tmp_path.glob("part-*"))
    pieces = [path for part in parts for path in part.rglob("*") if path.is_file() and path.name != "sums"]
    for part in parts:
        assert sum(path.stat().st_size for path in pieces if part in path.parents) <= 800
    for name, data in contents.items():
        own = sorted((path for path in pieces if path.match(f"{name}.*")), key=lambda path: path.suffix)
        assert b"".join(path.read_bytes() for path in own) == data
        assert f"{hashlib.sha256(data).hexdigest()}  {name}" in (parts[-1] / "sums").read_text()


def test_an_adapter_comes_back_in_half_its_size(tmp_path: Path) -> None:
    adapter = script("examples/grpo-pi/adapter.py")
    (tmp_path / "made").mkdir()
    save_file({"a": torch.full((8, 8), 0.5)}, tmp_path / adapter.WEIGHTS)
    (tmp_path / adapter.CONFIG).write_text(json.dumps({"r": 8, "base_model_name_or_path": "/where/it/was"}))
    adapter.write(tmp_path, tmp_path / "made")
    (tensor,) = load_file(tmp_path / "made" / adapter.WEIGHTS).values()
    assert tensor.dtype is torch.bfloat16
    assert bool((tensor == 0.5).all())
    assert json.loads((tmp_path / "made" / adapter.CONFIG).read_text()) == {
        "r": 8,
        "base_model_name_or_path": None,
    }
