#!/bin/bash
# Starts one machine's part of the published set-up, until training ends; slurm.sbatch and on_ray.py call it
# on every machine.
#
#   RANK=0 HOSTS="a b c d" bash examples/published/start.sh examples/published/pi.yaml
#
# The first machine has the server and trains on all its GPUs, the next ENGINES (1) machines serve the model
# with a vLLM on each of their GPUs (GPUS, 8), and the others run agents. SHARED (/shared) is a directory that
# all of them see, with the file `token`; DATA is on a local disk.
set -euo pipefail

RUN=${1:?which run}
here=$(dirname "$0")
read -ra hosts <<< "${HOSTS:?the machines of the job}"
: "${RANK:?which of them this is}" "${ENGINES:=1}" "${GPUS:=8}" "${SHARED:=/shared}" "${MODEL:=Qwen/Qwen3.5-4B}"
: "${PORT:=8700}" "${ENGINE_PORT:=8000}" "${DATA:=/tmp/polar-published-$USER/$RANK}"
server=http://${hosts[0]}:$PORT
POLAR_TOKEN=$(cat "$SHARED/token")
# The key guards what engines sample, not their weights: keep their ports among the job's machines.
export POLAR_TOKEN VLLM_API_KEY=$POLAR_TOKEN POLAR_ENGINE_KEY=$POLAR_TOKEN
mkdir -p "$DATA"
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
trap 'exit 143' TERM

answers() { until curl --silent --fail --output /dev/null "$1"; do sleep 1; done; }

if [ "$RANK" -eq 0 ]; then
    install -m 600 "$SHARED/token" "$DATA/token"
    polar serve --no-node --host 0.0.0.0 --insecure --port "$PORT" --data-dir "$DATA" &
    answers "$server/api/v1/health"
    polar train "$RUN" --processes "$GPUS" &
    wait $!
elif [ "$RANK" -le "$ENGINES" ]; then
    for gpu in $(seq 0 $((GPUS - 1))); do
        CUDA_VISIBLE_DEVICES=$gpu VLLM_SERVER_DEV_MODE=1 vllm serve "$MODEL" --host 0.0.0.0 \
            --port $((ENGINE_PORT + gpu)) --max-model-len 40960 --logprobs-mode processed_logprobs \
            --enable-prefix-caching --language-model-only &
    done
    wait -n # one that ends is the end of this part
else
    engines=()
    for host in "${hosts[@]:1:ENGINES}"; do
        for gpu in $(seq 0 $((GPUS - 1))); do
            engines+=(--engine-url "http://$host:$((ENGINE_PORT + gpu))")
            answers "http://$host:$((ENGINE_PORT + gpu))/health"
        done
    done
    answers "$server/api/v1/health"
    polar node --config "$here/polar.yaml" --server "$server" --name "node-$RANK" --data-dir "$DATA" \
        "${engines[@]}" &
    wait $!
fi
