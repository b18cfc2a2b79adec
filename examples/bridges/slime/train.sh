#!/usr/bin/env bash
# What Polar adds to a slime command: give it your model's and your cluster's arguments (docs/bridges/slime.md).
set -euo pipefail
: "${POLAR_SERVER:?the URL of polar serve}" "${POLAR_TOKEN:?its token}"
here=$(dirname "$(realpath "$0")")
python "$here/../rows.py" slime "$here/../tasks.yaml" rows.jsonl
exec python train.py \
  --prompt-data rows.jsonl --input-key prompt --label-key label --metadata-key metadata \
  --rollout-batch-size 4 --n-samples-per-prompt 16 --rollout-temperature 1.0 \
  --advantage-estimator grpo --use-tis \
  --custom-generate-function-path polar.bridges.slime.generate \
  --custom-reward-post-process-path polar.bridges.slime.normalise \
  "$@"
