#!/bin/bash
# Runs on the head of a Ray cluster: server, fleet, tasks, results; ends what it started.
set -euo pipefail

PORT=${PORT:-8700}
NODE_DIR=${NODE_DIR:-/tmp/polar-fleet-$USER} # a local disk of each machine

polar serve --no-node --host 0.0.0.0 --insecure --port "$PORT" & # plain HTTP among the job's machines
SERVER=$!
trap 'kill "$SERVER"; wait "$SERVER" || true' EXIT
until [ -e .polar/server.json ]; do kill -0 "$SERVER"; sleep 0.2; done

polar fleet up --address "$HEAD:6379" --nodes per-host \
    --server "http://$HEAD:$PORT" --engine-url "$ENGINE_URL" --data-dir "$NODE_DIR"
STATUS=0
polar submit "$TASKS" --wait || STATUS=$? # not 0 if a session failed: what the others gave is still kept
polar results --out "results-${SLURM_JOB_ID:-local}"
polar fleet down --address "$HEAD:6379"
exit "$STATUS"
