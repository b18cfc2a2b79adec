#!/bin/sh
# What the teacher's sessions teach without reinforcement learning: SFT on them until it converges, and how many
# held-out tasks each of its checkpoints solves (runs/sft-control/held-out.jsonl).
set -eu
here=examples/grpo-pi
export PATH="$PWD/.venv/bin:$PATH"
sh $here/teach.sh
polar train sft $here/sft-control.yaml
python $here/choose.py $here/gpu.yaml runs/sft-control --held-out
