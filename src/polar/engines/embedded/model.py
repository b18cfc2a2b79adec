"""A causal language model of transformers that computes on slots, checked against itself at load."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from polar.config.settings import EngineSettings
from polar.engines.embedded import attention
from polar.engines.embedded.attention import Packed, Segment, SlotCache, Step
from polar.engines.embedded.head import widen_logits
from polar.engines.embedded.weights import ensure_model
from polar.errors import InvalidInput, NotInstalled, PolarError
from polar.rendering.tokenizer_file import unlimited

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
        self.text_tokenizer: Tokenizer = unlimited(tokenizer.backend_tokenizer)
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

    def forward(self, segments: Sequence[Segment]) -> tuple[list[Segment], torch.Tensor]:
        """Compute the segments; the ones that want logits, and a row of logits for each."""
        packed = Packed(segments)
        step = Step(self.cache, packed, self._device, self._dtype)
        return [s for s in packed.segments if s.wants_logits], self._compute(step, step.lasts)

    def logits(self, segment: Segment) -> torch.Tensor:
        """Compute one segment; a row of logits for each of its tokens."""
        return self._compute(Step(self.cache, Packed([segment]), self._device, self._dtype), 0)

    def _compute(self, step: Step, kept: torch.Tensor | int) -> torch.Tensor:
        """The logits of the kept positions of the packed row; 0 keeps all."""
        with torch.inference_mode():
            out = self._model(
                input_ids=step.ids[None],
                position_ids=step.positions[None],
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=kept,
                slot_step=step,
            )
            logits: torch.Tensor = out.logits[0]
            return logits

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What it computes with, by name; weights that are shared have several."""
        found: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        return found

    def use(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compute with these from now on. They stay where they are in memory, and have its type."""
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
            _, logits = self.forward([Segment(0, start, ids[start:end], end == len(ids))])
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
        # cuDNN's attention plans anew for every shape, and hardly two chunks have the same.
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
    """As many slots as asked for, or as the memory holds if nobody asked."""
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
