"""A model that packed batches or chunked logits would compute otherwise is refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.kernel.flex.flex_attention import get_float32_precision

from polar.errors import InvalidInput
from polar.training.linear_attention import gated_delta_nets
from polar.training.material import PolicyVersions, material
from polar.training.policy import load_policy
from polar.training.settings import BatchSettings, ModelSettings, ObjectiveSettings, Pack
from polar.trajectory.prefix_merging import PrefixMerging
from tests.fakes.scripted_rollouts import group

ANSWERS = ([[10, 11, 12], [13, 14], [15, 16]], [[10, 20], [21]])
REWARDS = (1.0, 0.0)
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def write(directory: Path, config: Any) -> ModelSettings:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return ModelSettings(name=str(directory), device="cpu")


def test_logits_that_are_scaled_after_the_last_layer_are_refused(tmp_path: Path) -> None:
    from transformers import GraniteConfig

    load_policy(write(tmp_path / "plain", GraniteConfig(**SHAPE, logits_scaling=1.0)))
    with pytest.raises(InvalidInput, match="scaled or capped"):
        load_policy(write(tmp_path / "scaled", GraniteConfig(**SHAPE, logits_scaling=8.0)))


def test_windows_shorter_than_a_batch_are_refused(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    settings = write(tmp_path, Qwen2Config(**SHAPE, **window))
    load_policy(settings, most_tokens=32)
    with pytest.raises(InvalidInput, match="sliding_attention"):
        load_policy(settings, most_tokens=33)


def test_an_adapter_in_the_place_of_a_model_is_explained(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no model"):
        load_policy(ModelSettings(name=str(tiny_model), start=tmp_path, device="cpu"))
    lora = ModelSettings.model_validate(
        {"name": str(tiny_model), "start": tmp_path, "lora": {}, "device": "cpu"}
    )
    with pytest.raises(InvalidInput, match="holds no adapter"):
        load_policy(lora)


def test_linear_attention_of_another_kind_is_trained_one_trace_at_a_time(tmp_path: Path) -> None:
    from transformers import MiniMaxConfig

    kinds = ["linear_attention", "full_attention"]
    settings = write(tmp_path, MiniMaxConfig(**SHAPE, layer_types=kinds, num_local_experts=2, head_dim=8))
    with pytest.raises(InvalidInput, match=r"linear_attention.*batch\.pack"):
        load_policy(settings)
    policy = load_policy(settings, is_packed=False)
    objective = ObjectiveSettings()
    rolled_out = group(ANSWERS, REWARDS, builder=PrefixMerging(PrefixMerging.Options()), logprob=-4.0)
    made = material([rolled_out], objective, BatchSettings(pack=Pack.ALONE), versions=PolicyVersions(0))
    assert all(len(batch.names) == 1 for batch in made.packing.batches)
    assert all(bool(policy.logprobs(batch).isfinite().all()) for batch in made.packing.batches)


def test_layers_that_call_functions_of_their_own_are_not_taken_for_known_ones() -> None:
    """As transformers wrote them before 5.16: to replace what they call by name would change nothing."""

    class OwnFunctions(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv1d = torch.nn.Conv1d(2, 2, 4, groups=2)

        def forward(self, hidden: Any) -> Any:
            return self.torch_chunk_gated_delta_rule(self.causal_conv1d_fn(hidden))

    assert gated_delta_nets(OwnFunctions()) == []


def test_linear_attention_that_sees_tokens_in_an_unknown_way_is_refused(
    tiny_hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a later transformers may write it: both functions are called by name, and something else besides."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    def shift(hidden: torch.Tensor, _mask: Any) -> torch.Tensor:
        return hidden + 0.5 * torch.nn.functional.pad(hidden, (0, 0, 1, -1))

    monkeypatch.setattr(modeling_qwen3_5, "apply_mask_to_padding_states", shift)
    settings = ModelSettings(name=str(tiny_hybrid), device="cpu")
    with pytest.raises(InvalidInput, match=r"would see other traces.*batch\.pack"):
        load_policy(settings)
    load_policy(settings, is_packed=False)


def test_single_precision_is_meant_in_every_product(tiny_model: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert "tf32" in get_float32_precision()
        load_policy(ModelSettings(name=str(tiny_model), device="cpu", precision="float32"))
        assert "ieee" in get_float32_precision()
    finally:
        torch.set_float32_matmul_precision(before)
