"""Whatever the number of processes: the gradients, weights and numbers of one, at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from polar.training.policy import load_policy
from polar.training.settings import ModelSettings
from tests.fakes.ranks import assert_same, numbers, run_of, trained
from tests.fakes.tiny_hybrid import write_tiny_hybrid
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.training_runs import rolled_out, tensors

SINGLE, DOUBLE = 1e-4, 1e-9
"""What rounding may leave: layouts differ by no more in single precision, and in double nothing else does."""

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], float]] = {
    "2-trees": (2, {}, {}, SINGLE),
    "2-merged-double": (2, {"precision": "float64"}, {"batch": {"tokens": 20, "pack": "sequence"}}, DOUBLE),
    "2-adapter-checkpointed": (
        2,
        {"lora": {"rank": 2}, "gradient_checkpointing": True},
        {"optimizer": {"lr": 1e-3, "updates": 2, "max_grad_norm": 0.1}},
        SINGLE,
    ),
    "4-trees-double": (4, {"precision": "float64"}, {}, DOUBLE),
    "2-minibatches-double": (2, {"precision": "float64"}, {"minibatches": 2}, DOUBLE),
    "4-gspo-minibatches": (
        4,
        {},
        {
            "minibatches": 2,
            "objective": {"name": "gspo", "importance": "trace", "kl": 0.1, "kl_in": "reward"},
        },
        SINGLE,
    ),
    # Of a rank of 2, two of four processes hold no row.
    "4-merged-adapter": (
        4,
        {"lora": {"rank": 2}},
        {"batch": {"tokens": 20, "pack": "sequence"}},
        SINGLE,
    ),
}


def model(directory: Path, **changes: Any) -> dict[str, Any]:
    return {"name": str(directory), "device": "cpu", **changes}


@pytest.mark.parametrize("case", CASES)
def test_gradients_weights_and_numbers_are_those_of_one_process(
    tiny_model: Path, tmp_path: Path, case: str
) -> None:
    processes, changes, others, tolerance = CASES[case]
    changed = {"model": model(tiny_model, **changes), **others}
    alone, several = (run_of(tiny_model, tmp_path / name, **changed) for name in ("alone", "several"))
    expected, found = trained(alone, 1), trained(several, processes)
    assert_same(alone, expected, several, found, by=tolerance)
    assert len(found.parts()) == processes
    most_empty = alone.minibatches * (processes - 1)
    assert all(line["ranks"] == processes for line in numbers(several))
    assert all(line["empty_passes"] <= most_empty for line in numbers(several))


def test_tied_weights_are_written_once_and_read_by_transformers(tmp_path: Path) -> None:
    tied = write_tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    alone, several = (run_of(tied, tmp_path / name) for name in ("alone", "several"))
    expected, found = trained(alone, 1, steps=1), trained(several, 2, steps=1)
    assert tensors(found.weights).keys() == tensors(expected.weights).keys()
    ids = torch.tensor([[1, 2, 3]])
    ours, theirs = (
        load_policy(ModelSettings(name=str(tied), device="cpu"), weights=kept.weights).model(ids).logits
        for kept in (expected, found)
    )
    assert float((ours - theirs).detach().abs().max()) <= SINGLE


def test_experts_are_trained_and_written_as_by_one_process(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    alone, several = (run_of(tmp_path / "model", tmp_path / name, steps=2) for name in ("alone", "several"))
    assert_same(alone, trained(alone, 1), several, trained(several, 2), by=SINGLE)


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Qwen3_5MoeText"])
def test_states_follow_the_trees_that_a_rank_is_dealt(tmp_path: Path, family: str) -> None:
    hybrid = write_tiny_hybrid(tmp_path / "model", family)
    alone, several = (run_of(hybrid, tmp_path / name, steps=2) for name in ("alone", "several"))
    assert_same(alone, trained(alone, 1), several, trained(several, 2), by=SINGLE)


def test_every_rank_gets_the_scores_of_a_teacher_that_rank_0_asks(tiny_model: Path, tmp_path: Path) -> None:
    teacher = {
        "kind": "embedded",
        "model": str(write_tiny_llama(tmp_path / "teacher", hidden_size=32)),
        "device": "cpu",
        "threads": 1,
    }
    changed = {"minibatches": 2, "objective": {"name": "distill", "teacher": teacher}}
    alone, several = (run_of(tiny_model, tmp_path / name, **changed) for name in ("alone", "several"))
    assert_same(alone, trained(alone, 1), several, trained(several, 2), by=SINGLE)
    assert all(line["kl"] > 0 for line in numbers(several))


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "adapter"])
def test_a_run_goes_on_with_another_number_of_processes(
    tiny_model: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    changed = {"model": model(tiny_model, lora=lora), "steps": 4, "checkpoint": {"every": 1}}
    alone, changing = (run_of(tiny_model, tmp_path / name, **changed) for name in ("alone", "changing"))
    expected = trained(alone, 1)
    for processes, steps in ((2, 2), (1, 3), (4, 4)):
        found = trained(changing, processes, steps)
    assert_same(alone, expected, changing, found, by=SINGLE)
    assert [line.get("ranks") for line in numbers(changing)] == [2, 2, None, 4]


def test_every_rank_draws_anew_and_again_the_same(tiny_model: Path, tmp_path: Path) -> None:
    once, again = (trained(run_of(tiny_model, tmp_path / name), 2, steps=1) for name in ("once", "again"))
    first, second = ([part["random"]["torch"] for part in kept.parts()] for kept in (once, again))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "adapter"])
def test_engines_sample_with_what_all_ranks_have_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, int] | None
) -> None:
    """Everything is real: agents, gateway, evaluator, engine; each step is sampled with the one before."""
    monkeypatch.chdir(tmp_path)
    tiny = write_tiny_llama(tmp_path / "model", max_position_embeddings=1024)
    run = rolled_out(tiny, tmp_path, synchronous=True)
    run = run.model_copy(update={"model": ModelSettings.model_validate(model(tiny, lora=lora))})
    trained(run, 2)
    lines = numbers(run)
    assert [line["version"] for line in lines] == sorted({line["version"] for line in lines})
    assert len(lines) == 3
    # The engine's logprobs are the trainer's own, also after the weights have moved.
    assert all(line["behaviour_kl"] < 1e-4 for line in lines if "behaviour_kl" in line)
    assert sum("behaviour_kl" in line for line in lines) >= 2
