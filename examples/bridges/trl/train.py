"""Trains with TRL's GRPOTrainer on sessions of a running `polar serve`.

polar serve --model smollm2-135m-instruct &
python examples/bridges/trl/train.py examples/bridges/tasks.yaml --model smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from polar.bridges.trl import Rollouts, reward
from polar.engines.embedded.weights import ensure_model
from polar.tasksets.files import load_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=Path)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="the model that the server samples with"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4, help="sessions per group")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    model = ensure_model(given.model)
    rollouts = Rollouts(load_tasks(given.tasks))
    GRPOTrainer(
        model=str(model),
        args=GRPOConfig(
            output_dir=str(given.out),
            per_device_train_batch_size=given.samples,
            num_generations=given.samples,
            max_steps=given.steps,
            learning_rate=given.lr,
            temperature=1.0,
            use_cpu=given.cpu,
            bf16=not given.cpu,
            model_init_kwargs={"dtype": "float32"},
            logging_steps=1,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(rollouts.dataset()),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        rollout_func=rollouts,
        reward_funcs=reward,
    ).train()
    print("left out:", dict(rollouts.excluded) or "nothing")


if __name__ == "__main__":
    main()
