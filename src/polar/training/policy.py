"""The trained model: its weights, and the logprobs of sampled tokens.

On a GPU it computes in bfloat16 with FlexAttention over block masks; on a CPU in float32 with a dense mask.
Trained weights stay in float32, since steps of a usual learning rate vanish between two bfloat16 numbers.
Nothing here waits for the GPU: while it computes a batch, the next is sent.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.overrides import TorchFunctionMode

from polar.app.weights import SharedWeights
from polar.engines.embedded.weights import ensure_model
from polar.engines.transfer import Share
from polar.errors import InvalidInput, NotInstalled
from polar.training.checkpoint import write_weights
from polar.training.head import Manner, score, to_device
from polar.training.linear_attention import LINEAR, StateTree, gated_delta_nets, has_kernels
from polar.training.ranks import Collective, Ranks
from polar.training.routing import RoutingReplay
from polar.training.settings import Lora, ModelSettings
from polar.training.sharding import shard, whole
from polar.trajectory.packing.batch import BLOCK, Batch, Trained, TrainingRow, block_mask_of, dense_mask
from polar.trajectory.packing.pack import pack_sequences

SHAPES = 2
"""Number of sizes that batches are padded to on a GPU, with kernels compiled for each. All but the last batch
of a step are nearly full."""
PROBE = (1, 2, 3, 5, 8, 13)
"""Token ids in every vocabulary."""
PROBE_TOLERANCE = 1e-3
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "vocab*", "merges*"),
    *("chat_template*", "additional_chat_templates/*"),
)
ADAPTER = "adapter_config.json"
FULL = "full_attention"
FLEX = "flex_attention"
BLOCKS = "polar_blocks"
"""FlexAttention under a name of ours."""
Placement = tuple[torch.device, str]
"""The device that a model is loaded to, and how it computes attention there. Loaded to META, it has shapes
and no weights."""
CPU, META = torch.device("cpu"), torch.device("meta")
_ALONE = Ranks()
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class TrainerPolicy:
    """A causal language model, set up to train on packed batches."""

    def __init__(
        self,
        model: Any,
        directory: Path,
        settings: ModelSettings,
        device: torch.device,
        ranks: Ranks,
        *,
        temperature: float = 1.0,
        most_tokens: int = 16_384,
        is_packed: bool = True,
        has_reference: bool = False,
    ) -> None:
        self.ranks = ranks
        self.model = model
        """A transformers model, or a `peft` model around one."""
        self.directory = directory
        """The model's directory; of an adapter, the base model's."""
        self._causal = model.get_base_model() if settings.lora else model
        self.is_adapter = settings.lora is not None
        """Whether an adapter is trained, and the model's own weights stay."""
        self._device = device
        self._dtype = _dtype_of(settings, self._device)
        self._manner = Manner(self._dtype, settings.chunk, temperature)
        self._granule = _granule(most_tokens)
        self._is_packed = is_packed
        self._has_blocks = self._causal.config._attn_implementation in (FLEX, BLOCKS)
        self._reference = self._frozen_copy(settings) if has_reference else None
        if is_packed:
            self._check_layers(most_tokens)
        held_on = next(model.parameters()).device
        if held_on != META:
            self._check_head()
        models = [model for model in (self._causal, self._reference) if model is not None]
        self._states: StateTree | None = None
        if is_packed and gated_delta_nets(self._causal):
            self._states = StateTree(models, self._device, has_kernels=has_kernels(self._device, self._dtype))
            # Of several ranks with GPUs, none has the weights where they are computed with yet.
            if held_on.type == device.type:
                self._check_states(self._states)
        self._routing: RoutingReplay | None = None
        if settings.routing == "replay":
            self._routing = RoutingReplay(models)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name; of several ranks, this one's rows of them."""
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return list(self.trained.values())

    @property
    def pairs_per_token(self) -> float:
        """How many pairs of tokens that attend to each other cost as much as all else that a token costs.

        A layer of width w has about 12 w² weights, at two operations each, and 4 w operations for a pair.
        """
        return float(6 * self._causal.config.get_text_config().hidden_size)

    @property
    def device(self) -> torch.device:
        return self._device

    def measure(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each term's logprob, and the entropy of its distribution."""
        return self._measured(self._causal, batch)

    def logprobs(self, batch: Batch) -> Tensor:
        """Each term's logprob, without gradients."""
        with torch.no_grad():
            return self._measured(self._causal, batch)[0]

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Each term's logprob under the initial policy."""
        without_adapter = nullcontext() if self._reference is not None else self.model.disable_adapter()
        with torch.no_grad(), without_adapter:
            return self._measured(self._reference or self._causal, batch)[0]

    def shard(self) -> None:
        """Spread the weights over all ranks."""
        for causal in filter(None, (self._causal, self._reference)):
            shard(causal, _layers(causal), self._device)
            # All that a pass computes belongs to it, also what is made of the last layer's weights.
            causal.measured = partial(self._measure, causal)
            register_fsdp_forward_method(causal, "measured")

    def gather(self, precision: torch.dtype | None = None) -> dict[str, Tensor]:
        """Bring the weights, or the adapter, to rank 0's main memory, tensor by tensor."""
        self.ranks.order(Collective.GATHER, precision)
        found = {}
        for name, tensor in self._own_tensors(precision):
            gathered = whole(tensor)
            if self.ranks.leads:
                found[name] = gathered.to(CPU)
        return found

    def save(self, directory: Path) -> None:
        """Write the weights, or the adapter alone, as `from_pretrained` reads them."""
        gathered = self.gather() if self.ranks.size > 1 else None
        self.model.save_pretrained(directory, state_dict=gathered)
        self._add_tokenizer(directory)

    def export(self, directory: Path) -> None:
        """Write the weights in the engines' precision.

        Trained weights are kept in float32, twice the bytes, and rounded before each product anyway.
        """
        if self.is_adapter:
            self.save(directory)
            return
        self._write(directory, self._engine_tensors())

    def share(self, directory: Path, share: Share) -> SharedWeights | None:
        """Share a copy on this GPU with engines; the returned object frees it."""
        if self.is_adapter or self._device.type != "cuda":
            return None
        shared = share(self._engine_tensors(copy=True), directory)
        write = partial(self._write, directory, shared.tensors)
        return SharedWeights(write, shared.withdraw, files_at_once=shared.files_at_once)

    def _engine_tensors(self, *, copy: bool = False) -> dict[str, Tensor]:
        """All weights in the engines' precision, named and split as in checkpoints."""
        from transformers.core_model_loading import revert_weight_conversion

        if self.ranks.size > 1:
            tensors = self.gather(self._dtype)
        else:
            tensors = dict(self._own_tensors(self._dtype, copy=copy))
        return dict(revert_weight_conversion(self.model, tensors))

    def _own_tensors(
        self, precision: torch.dtype | None, *, copy: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """What is not tied to another tensor, and of a model with an adapter what is trained."""
        names = {name for name, _ in chain(self.model.named_parameters(), self.model.named_buffers())}
        if self.is_adapter:
            names = set(self.trained)
        for name, tensor in self.model.state_dict().items():
            if name in names:
                is_rounded = precision is not None and tensor.is_floating_point()
                yield name, tensor.to(precision if is_rounded else tensor.dtype, copy=copy)

    def _write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        self.model.config.save_pretrained(directory)
        self.model.generation_config.save_pretrained(directory)
        write_weights(tensors, directory)
        self._add_tokenizer(directory)

    def _add_tokenizer(self, directory: Path) -> None:
        for pattern in _TOKENIZER_FILES:
            for file in self.directory.glob(pattern):
                copied = directory / file.relative_to(self.directory)
                copied.parent.mkdir(exist_ok=True)
                shutil.copy(file, copied)

    def _measured(self, causal: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = (
            self._measure(causal, batch) if self.ranks.size == 1 else causal.measured(batch)
        )
        return found

    def _measure(self, causal: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        # A token that several rows train is computed once and stands in several terms.
        targets, inverse = np.unique(batch.terms.targets, return_inverse=True)
        sources, labels, back = (
            to_device(array, self._device).long()
            for array in (batch.predecessors[targets], batch.ids[targets], inverse)
        )
        with self._precision():
            hidden = self._hidden(causal, batch)[sources]
        logprobs, entropy = score(hidden, causal.get_output_embeddings().weight, labels, self._manner)
        return logprobs[back], entropy[back]

    def _hidden(self, causal: Any, batch: Batch) -> Tensor:
        """Output of the last layer."""
        mask: Any = None
        if self._is_packed:
            batch, mask = self._mask(batch)
        if self._states is not None:
            self._states.follow(batch)
            # By layer type: what transformers derives a mask for linear attention from is no block mask.
            mask = {FULL: mask, LINEAR: None}
        ids, positions = (
            to_device(array, self._device).long()[None] for array in (batch.ids, batch.positions)
        )
        if self._routing is not None:
            layers = causal.config.get_text_config().num_hidden_layers
            self._routing.replay(batch.routing, layers, self._device)
        made = causal.base_model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
        hidden: Tensor = made.last_hidden_state[0]
        return hidden

    def _mask(self, batch: Batch) -> tuple[Batch, Any]:
        if not self._has_blocks:
            return batch, to_device(dense_mask(batch), self._device)[None, None]
        batch = batch.padded(-(-len(batch) // self._granule) * self._granule)
        return batch, block_mask_of(to_device(batch.ends, self._device))

    def _precision(self) -> Any:
        match self._dtype:
            case torch.bfloat16:
                return torch.autocast(self._device.type, self._dtype)
            case torch.float64:
                return Doubled()
        return nullcontext()

    def _frozen_copy(self, settings: ModelSettings) -> Any:
        """A copy of the current model; None if disabling the adapter gives the same."""
        if self.is_adapter and settings.start is None:
            return None
        return copy.deepcopy(self._causal).requires_grad_(False)

    def _check_layers(self, most_tokens: int) -> None:
        """Refuse models with layers that a mask cannot keep from seeing other traces of a batch."""
        config = self._causal.config.get_text_config()
        layers = list(getattr(config, "layer_types", None) or [FULL])
        kinds = set(layers)
        if len(gated_delta_nets(self._causal)) == layers.count(LINEAR):
            kinds.discard(LINEAR)
        window = getattr(config, "sliding_window", None)
        if window is not None and window >= most_tokens:
            kinds.discard("sliding_attention")
        if others := sorted(kinds - {FULL}):
            raise InvalidInput(
                f"model {self.directory.name}: it has layers of {', '.join(others)}, which cannot be packed",
                hint="set batch.pack to alone; Gated DeltaNet is packed with transformers 5.16 or newer",
            )

    def _check_states(self, states: StateTree) -> None:
        """Refuse layers of linear attention that are written otherwise than those known here."""
        untrained = Trained(*(np.empty(0, dtype) for dtype in ("q", "f", "f", "f", "i")))
        rows = [TrainingRow(name, np.array(PROBE, np.int32), untrained) for name in "ab"]
        (batch,) = pack_sequences(rows, 2 * len(PROBE)).batches
        with self._precision():
            if not states.keeps_apart(batch, self._causal.config.get_text_config().hidden_size):
                raise InvalidInput(
                    f"model {self.directory.name}: packed, its linear attention would see other traces",
                    hint="set batch.pack to alone, or install transformers 5.16 to 5.23",
                )

    def _check_head(self) -> None:
        """Refuse models whose logits are more than a product of their last layer's weights."""
        head = self._causal.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None:
            raise InvalidInput(
                f"model {self.directory.name}: its last layer is more than one matrix of weights",
                hint="no bias, adapter or quantised form of it is trained; see model.lora.targets",
            )
        ids = torch.tensor([PROBE], device=head.weight.device)
        with torch.no_grad(), self._precision(), _plain_attention(self._causal):
            whole = self._causal(input_ids=ids, use_cache=False).logits.float()
            hidden = self._causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
            ours = head(hidden).float()
        if float((whole - ours).abs().max()) > PROBE_TOLERANCE * max(1.0, float(whole.abs().max())):
            raise InvalidInput(
                f"model {self.directory.name}: its logits are scaled or capped after its last layer",
                hint="this trainer computes them in chunks and would train another model",
            )


class Doubled(TorchFunctionMode):  # type: ignore[misc]
    """Computes in float64 what models compute in float32 whatever they are given, such as norms."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def doubled(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        named = {name: doubled(value) for name, value in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*map(doubled, args), **named)


def load_policy(
    settings: ModelSettings,
    *,
    weights: Path | None = None,
    temperature: float = 1.0,
    most_tokens: int = 16_384,
    is_packed: bool = True,
    has_reference: bool = False,
    ranks: Ranks = _ALONE,
) -> TrainerPolicy:
    """Load the model, with a checkpoint's weights or those of the settings. All ranks do so together.

    `most_tokens` is the largest batch, `is_packed` whether batches may have several traces.
    """
    directory = ensure_model(settings.name)
    device = _device(settings.device)
    start = settings.start if weights is None or has_reference else weights
    dtype = _dtype_of(settings, device)
    # What is computed in float64 is to check everything else, FlexAttention's kernels among it.
    has_blocks = device.type == "cuda" and is_packed and dtype is not torch.float64
    # Of several ranks one has all weights, and never on its GPU.
    home = device if ranks.size == 1 else CPU if ranks.leads else META
    place: Placement = (home, FLEX if has_blocks else "sdpa")
    model = (
        _add_adapter(settings.lora, directory, start, place, dtype)
        if settings.lora
        else _load(start or directory, place)
    )
    _without_dropout(model)
    if device.type == "cuda":
        # Batches have few sizes: a kernel for each is quicker, and surer, than one for any size.
        torch._dynamo.config.automatic_dynamic_shapes = False
    if dtype is torch.float64:
        model.double()
        # Grouped products of experts know no float64.
        model.set_experts_implementation("eager")
    if dtype is torch.float32:
        # Said aloud, in both ways to say it: some FlexAttention takes silence for leave to multiply in TF32.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    if settings.gradient_checkpointing:
        again = {"context_fn": lambda: (nullcontext(), Doubled())} if dtype is torch.float64 else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False} | again)
        model.config.use_cache = False
    model.train()
    policy = TrainerPolicy(
        model,
        directory,
        settings,
        device,
        ranks,
        temperature=temperature,
        most_tokens=most_tokens,
        is_packed=is_packed,
        has_reference=has_reference,
    )
    if weights is not None and start != weights and ranks.leads:
        # The reference is what the run began with, so that is loaded first.
        _replace(policy, weights)
    if ranks.size > 1:
        # Until rank 0 has read its files, the others have nothing to do.
        ranks.wait()
        policy.shard()
    if settings.compile:
        for layer in _layers(model):
            layer.compile()
    return policy


def block_attention(config: Any) -> str:
    """The attention that takes block masks.

    transformers lists hybrid models as without FlexAttention, though they take any attention by its name.
    """
    from transformers import AttentionInterface
    from transformers.integrations.flex_attention import flex_attention_forward

    if LINEAR not in (getattr(config.get_text_config(), "layer_types", None) or ()):
        return FLEX
    AttentionInterface.register(BLOCKS, flex_attention_forward)
    return BLOCKS


def _load(directory: Path, place: Placement, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    device, attention = place
    logging.disable_progress_bar()
    if not (directory / "config.json").is_file():
        raise InvalidInput(f"{directory}: holds no model", hint="to begin with an adapter, set model.lora")
    try:
        config = AutoConfig.from_pretrained(directory)
        if attention == FLEX:
            attention = block_attention(config)
        if device == META:
            with device:
                return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"model {directory.name}: cannot be trained: {reason}") from None
    return model.to(device)


def _add_adapter(
    lora: Lora, directory: Path, start: Path | None, place: Placement, dtype: torch.dtype
) -> Any:
    """Add a new adapter, or load the initial one, which has its own rank."""
    model = _with_adapter(lora, directory, start, place, dtype)
    for module in model.modules():
        # Autocast would bring to bfloat16 again what peft casts to the adapter's float32.
        if dtype is torch.bfloat16 and hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    return model


def _with_adapter(
    lora: Lora, directory: Path, start: Path | None, place: Placement, dtype: torch.dtype
) -> Any:
    try:
        from peft import LoraConfig, PeftModel, get_peft_model
    except ImportError:
        raise NotInstalled("model.lora needs peft", hint="pip install 'polar-rl[train]'") from None
    base = _load(directory, place, dtype)
    if start is not None:
        if not (start / ADAPTER).is_file():
            raise InvalidInput(f"{start}: holds no adapter", hint=f"{ADAPTER} is missing")
        return PeftModel.from_pretrained(base, start, is_trainable=True)
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def _replace(policy: TrainerPolicy, weights: Path) -> None:
    """Replace the weights by a checkpoint's."""
    if (weights / ADAPTER).is_file():
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(policy.model, load_peft_weights(str(weights), device="cpu"))
    else:
        # Files lack what is tied to other weights, and hold each expert's apart: only a model reads them.
        dtype = next(policy.model.parameters()).dtype
        saved = _load(weights, (torch.device("cpu"), "sdpa"), dtype)
        policy.model.load_state_dict(saved.state_dict())


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Attention without compilation, for a few tokens."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _without_dropout(model: Any) -> None:
    """The policy that is trained is the one that samples, and engines drop nothing."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def _device(asked: str) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise NotInstalled("model.device: cuda: torch sees no GPU", hint="set it to cpu or auto")
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(asked)


def _dtype_of(settings: ModelSettings, device: torch.device) -> torch.dtype:
    if settings.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return PRECISIONS[settings.precision]


def _layers(model: Any) -> list[nn.Module]:
    """The layers that a transformer repeats: compiled once, each of them runs the same code."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda layers: sum(one.numel() for one in layers.parameters()), default=[]))


def _granule(most_tokens: int) -> int:
    """The divisor of batch sizes on a GPU."""
    return -(-most_tokens // (SHAPES * BLOCK)) * BLOCK
