#!/bin/sh
# The whole way on one GPU, in the repository's root: what the teacher plays, the warm start on it, GRPO from
# there with each seed, and the curve. Interrupted, the same command goes on: no part is done twice.
#   sh examples/grpo-pi/whole.sh            seed 0
#   SECONDS_EACH=600 sh examples/grpo-pi/whole.sh 0 1 2
set -eu
here=examples/grpo-pi
export PATH="$PWD/.venv/bin:$PATH"
[ $# -gt 0 ] || set -- 0

sh $here/teach.sh
polar train sft $here/sft.yaml
[ -e runs/warm-start/chosen ] || python $here/choose.py $here/gpu.yaml runs/warm-start
for seed; do
    polar train $here/gpu.yaml --seed "$seed" --out "runs/seed-$seed" --seconds "${SECONDS_EACH:-600}"
done
python $here/curve.py runs/seed-*/metrics.jsonl --out runs/learning
