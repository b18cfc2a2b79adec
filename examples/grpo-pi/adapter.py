"""Writes a checkpoint's adapter in bfloat16, as a directory or a zip file.

python examples/grpo-pi/adapter.py runs/warm-start/checkpoints/step-000040/weights adapter.zip
python examples/grpo-pi/adapter.py runs/warm-start/checkpoints/step-000040/weights examples/warm-start
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as made:
        write(source, Path(made))
        if target.suffix == ".zip":
            shutil.make_archive(str(target.with_suffix("")), "zip", made)
        else:
            shutil.copytree(made, target, dirs_exist_ok=True)


def write(source: Path, into: Path) -> None:
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in load_file(source / WEIGHTS).items()
    }
    save_file(tensors, into / WEIGHTS)
    config = json.loads((source / CONFIG).read_text())
    # The path of the base weights is not part of the adapter.
    config["base_model_name_or_path"] = None
    (into / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
