"""AReaL's GRPO with Polar's workflow; arguments are AReaL's own (docs/bridges/areal.md)."""

from __future__ import annotations

import argparse

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import load_dataset

from polar.bridges.areal import workflow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8, help="sessions per group")
    given, arguments = parser.parse_known_args()
    config, _ = load_expr_config(arguments, GRPOConfig)
    rows = load_dataset("json", data_files=config.train_dataset.path, split="train")
    with PPOTrainer(config, train_dataset=rows, valid_dataset=None) as trainer:
        trainer.train(workflow=workflow(config, given.samples), eval_workflow=None)


if __name__ == "__main__":
    main()
