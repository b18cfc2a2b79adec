"""A causal language model of transformers that computes on slots, checked against itself at load.

Its weights can be replaced by others from files, which are mapped, not read: one that a trainer wrote to
shared memory (a path below /dev/shm) is copied once, into the model itself. On a GPU logits are float32,
whatever the model computes in: those of 20 lie an eighth apart in bfloat16.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from polar.config.settings import EngineSettings
from polar.engines.embedded import attention
from polar.engines.embedded.attention import AttentionSegment, SlotCache, Step
from polar.engines.embedded.weights import ensure_model
from polar.errors import InvalidInput, NotInstalled, PolarError
from polar.rendering.tokenizer import remove_limits

log = logging.getLogger(__name__)

USE_VLLM = "serve it with vLLM and set engine.url"
MEMORY_SHARE = 0.6
"""Part of the free memory that the KV buffers may grow to."""


class SlotModel:
    """Weights, tokenizer and KV slots of one model."""

    def __init__(
        self, name: str, model: Any, tokenizer: Any, *, slots: int, context: int, directory: Path
    ) -> None:
        self.name = name
        self.directory = directory
        """Holds the weights that it began with."""
        self.tokenizer = tokenizer
        self.text_tokenizer: Tokenizer = remove_limits(tokenizer.backend_tokenizer)
        self.context = context
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self._model = model
        self._device = model.device
        self._dtype = model.dtype
        self._mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        """Stands for a ready-made mask, so that the model does not make one; the slots know theirs."""
        self.cache = SlotCache(slots, context)

    @property
    def is_on_cpu(self) -> bool:
        return str(self._device.type) == "cpu"

    def forward(self, segments: Sequence[AttentionSegment]) -> tuple[list[AttentionSegment], torch.Tensor]:
        """Compute the segments; return those that want logits, with the rows of logits."""
        step = Step(self.cache, segments, self._device, self._dtype)
        with torch.inference_mode():
            out = self._model(
                input_ids=step.ids[None],
                position_ids=step.positions[None],
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=step.wanted,
                slot_step=step,
            )
        return [s for s in step.segments if s.logits], out.logits[0]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by name; shared weights have several names."""
        found: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        return found

    def use(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use these weights, copied in place in the model's own type."""
        weights = self.weights
        with torch.no_grad():
            for name, tensor in tensors.items():
                weights[name].copy_(tensor)

    def check(self) -> None:
        """Raise unless slots give the logits of the model's own attention."""
        ids = [(7 * i + 3) % self.vocabulary for i in range(min(13, self.context))]
        with torch.inference_mode():
            self._model.set_attn_implementation("sdpa")
            expected = self._model(torch.tensor([ids], device=self._device), use_cache=False).logits[0, -1]
        self._model.set_attn_implementation(attention.NAME)
        for start, end in ((0, 7), (7, 12), (12, 13)):
            _, logits = self.forward([AttentionSegment(0, start, ids[start:end], end == len(ids))])
        error = float((logits[-1].float() - expected.float()).abs().max() / expected.float().std())
        tolerance = 1e-2 if self._dtype == torch.float32 else 0.25
        if not error <= tolerance:
            raise NotImplementedError(f"slots give other logits than the model (by {error:.3g} deviations)")


def load(settings: EngineSettings) -> SlotModel:
    """The configured model, ready to compute; NotInstalled or InvalidInput in one line if it cannot be."""
    directory = ensure_model(settings.model)
    transformers_logging.disable_progress_bar()
    # Its lines are to look like everyone's.
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    attention.register()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = _device(settings)
    dtype = _dtype(settings, device)
    if device.type == "cuda":
        # cuDNN's attention plans again for every shape, and chunks hardly ever share one.
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        config = AutoConfig.from_pretrained(directory)
        _refuse_other_caches(settings.model, config)
        context = _context(settings, config)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except PolarError:
        raise
    except Exception as error:
        # Whatever transformers, safetensors or the model's own code finds wrong with the files.
        raise NotInstalled(f"model {settings.model}: cannot be loaded: {_first_line(error)}") from None
    widen_logits(model)
    slots = _slots(settings, config, device, dtype, context)
    loaded = SlotModel(settings.model, model, tokenizer, slots=slots, context=context, directory=directory)
    try:
        loaded.check()
    except Exception as error:
        # An architecture that does not take attention, positions or logits the common way fails anyhow.
        raise NotInstalled(
            f"model {settings.model}: the embedded engine cannot run it: {_first_line(error)}", hint=USE_VLLM
        ) from None
    log.info("model %s on %s, %d slots of %d tokens", settings.model, device, slots, context)
    return loaded


def _refuse_other_caches(name: str, config: Any) -> None:
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    other = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if other:
        raise NotInstalled(
            f"model {name}: the embedded engine keeps plain attention caches only, not {', '.join(other)}",
            hint=USE_VLLM,
        )


def _context(settings: EngineSettings, config: Any) -> int:
    own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    context: int | None = settings.max_context or own
    if context is None:
        raise InvalidInput(
            f"model {settings.model}: its configuration names no context length", hint="set max_context"
        )
    if own is not None and settings.max_context is not None and settings.max_context > own:
        raise InvalidInput(f"max_context: model {settings.model} has a context of {own} tokens")
    return context


def _device(settings: EngineSettings) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device: no CUDA device can be used from this torch build", hint="device: auto")
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def _dtype(settings: EngineSettings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype


def _slots(settings: EngineSettings, config: Any, device: torch.device, dtype: Any, context: int) -> int:
    """The configured number of slots, or as many as memory holds."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    slot_bytes = 2 * text.num_hidden_layers * heads * size * context * dtype.itemsize
    fitting = int(_free_bytes(device) * MEMORY_SHARE / slot_bytes)
    if settings.slots is None:
        return max(1, min(64 if device.type == "cuda" else 8, fitting))
    if device.type == "cuda" and settings.slots > fitting:
        raise InvalidInput(
            f"slots: {settings.slots} of {context} tokens need {settings.slots * slot_bytes / 2**30:.1f} GiB"
            f" of GPU memory, {fitting} fit",
            hint="lower slots or max_context",
        )
    return settings.slots


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 16 * 2**30


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for eos in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(found)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two matrices. Half-precision factors are summed in float32, and the result stays float32."""
    if left.dtype.itemsize > 2:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def widen_logits(model: Any) -> None:
    """Have a model on a GPU give the logits of its last layer in float32."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.is_cuda:
        head.forward = MethodType(_logits, head)


def _logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    logits = product(hidden.flatten(0, -2), head.weight.T)
    if head.bias is not None:
        logits += head.bias
    return logits.unflatten(0, hidden.shape[:-1])


ADAPTER = "adapter_config.json"
_ADAPTER_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights and the version that tokens sampled with them carry."""

    version: int
    tensors: Mapping[str, torch.Tensor]


def read_weights(
    version: int, path: Path | None, base: Path, weights: Mapping[str, torch.Tensor]
) -> NewWeights:
    """The weights at a path for a model that has `weights` now; InvalidInput if they are not its own.

    `path` is a directory with safetensors, one such file, or the directory of a LoRA adapter to the weights
    in `base`; None: those themselves.
    """
    source = base if path is None else path
    try:
        is_adapter = (source / ADAPTER).is_file()
        tensors = _merge_adapter(_tensors(base), source) if is_adapter else _tensors(source)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"the weights at {source} cannot be read: {error}") from None
    _check(tensors, weights, source)
    return NewWeights(version, tensors)


def _tensors(source: Path) -> dict[str, torch.Tensor]:
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files:
        raise ValueError("the directory holds no safetensors")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def _merge_adapter(tensors: dict[str, torch.Tensor], adapter: Path) -> dict[str, torch.Tensor]:
    """Merge a LoRA adapter, as `peft` saves one, into the weights."""
    config: dict[str, Any] = json.loads((adapter / ADAPTER).read_text())
    unknown = [name for name in ("use_dora", "rank_pattern", "alpha_pattern") if config.get(name)]
    if config.get("peft_type") != "LORA" or unknown or config.get("bias", "none") != "none":
        raise ValueError(f"only plain LoRA adapters can be merged{': not ' + unknown[0] if unknown else ''}")
    rank = int(config["r"])
    scale = float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)
    added = _tensors(adapter)
    downs = {name: tensor for name, tensor in added.items() if name.endswith(_DOWN)}
    if len(added) != 2 * len(downs):
        raise ValueError("the adapter holds more than pairs of lora_A and lora_B")
    for name, down in downs.items():
        target = name.removeprefix(_ADAPTER_PREFIX).removesuffix(_DOWN) + ".weight"
        up, weight = added[name.removesuffix(_DOWN) + _UP], tensors[target]
        tensors[target] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
    return tensors


def _check(tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], source: Path) -> None:
    unknown = tensors.keys() - weights.keys()
    if unknown:
        raise InvalidInput(f"the weights at {source} are of another model: it has no {_some(unknown)}")
    given = {weights[name].data_ptr() for name in tensors}
    missing = {name for name, weight in weights.items() if weight.data_ptr() not in given}
    if missing:
        raise InvalidInput(f"the weights at {source} are not whole: {_some(missing)} is missing")
    for name, tensor in tensors.items():
        if tensor.shape != weights[name].shape:
            shapes = f"{list(tensor.shape)} instead of {list(weights[name].shape)}"
            raise InvalidInput(f"the weights at {source} are of another model: {name} is {shapes}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InvalidInput(f"the weights at {source} hold infinities or NaN: {name}")


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
