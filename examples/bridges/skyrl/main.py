"""SkyRL's trainer with Polar's generator; arguments are SkyRL's own (docs/bridges/skyrl.md)."""

from __future__ import annotations

import sys
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils.utils import initialize_ray

from polar.bridges.skyrl import PolarGenerator


class PolarExperiment(BasePPOExp):  # type: ignore[misc]
    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> PolarGenerator:
        return PolarGenerator(filler=tokenizer.eos_token_id)


@ray.remote(num_cpus=1)
def train(config: Any) -> None:
    PolarExperiment(config).run()


if __name__ == "__main__":
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    initialize_ray(config)
    ray.get(train.remote(config))
