#!/usr/bin/env bash
# GRPO with verl on sessions of a `polar serve` whose engine is verl's vLLM server (docs/bridges/verl.md).
set -euo pipefail
: "${POLAR_SERVER:?the URL of polar serve}" "${POLAR_TOKEN:?its token}" "${MODEL:?a model directory or Hugging Face id}"
here=$(dirname "$(realpath "$0")")
python "$here/../rows.py" verl "$here/../tasks.yaml" rows.parquet
exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files=rows.parquet data.val_files=rows.parquet data.return_raw_chat=True \
  data.train_batch_size=4 data.max_prompt_length=8192 data.max_response_length=16384 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.agent.default_agent_loop=polar \
  actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/agent_loop.yaml" \
  trainer.logger=console "$@"
