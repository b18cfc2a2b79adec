"""AReaL's GRPO with Polar's workflow; arguments are AReaL's own (docs/bridges/areal.md)."""

from __future__ import annotations

import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import load_dataset

from polar.bridges.areal import PolarWorkflow


def main(arguments: list[str]) -> None:
    config, _ = load_expr_config(arguments, GRPOConfig)
    rows = load_dataset("json", data_files=config.train_dataset.path, split="train")
    with PPOTrainer(config, train_dataset=rows, valid_dataset=None) as trainer:
        trainer.train(workflow=PolarWorkflow(config.gconfig.temperature), eval_workflow=None)


if __name__ == "__main__":
    main(sys.argv[1:])
