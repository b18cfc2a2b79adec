#!/bin/sh
# The whole way in calls of limited time, for a GPU machine that you have for minutes at a time.
# Where it has no network, unpack an offline bundle first (docs/guides/offline.md).
#   OUT=dir sh examples/grpo-pi/timed.sh sft 300           the warm start, and which of its checkpoints is taken
#   OUT=dir sh examples/grpo-pi/timed.sh grpo 400 0        GRPO with seed 0; again: it goes on
#   OUT=dir sh examples/grpo-pi/timed.sh curve             the picture and the table of all seeds so far
# A timed GRPO call measures the held-out tasks before its first step and after its last, and
# ends by itself; of its seconds RESERVE (160) are for vLLM's start and these measurements. More words after the seed are passed to `polar train`, for example --steps 100.
# RUN and SFT name other settings. Everything worth keeping is copied to $OUT while it runs.
set -u
[ ! -f .offline/env ] || . .offline/env
: "${PYTHON3:=python3}" "${RUNTIME:=bubblewrap}"
export PYTHON3
: "${OUT:=runs/out}" "${RESERVE:=160}"
mkdir -p "$OUT" runs
export RUN="${RUN:-examples/grpo-pi/gpu.yaml}"
part=$1
seconds=${2:-400}
seed=${3:-0}
shift; [ $# -gt 0 ] && shift; [ $# -gt 0 ] && shift
if [ "$RUNTIME" != bubblewrap ]; then
    [ -f polar.yaml ] || echo "node: {runtimes: [$RUNTIME]}" > polar.yaml
    sed -i "s/runtime: bubblewrap/runtime: $RUNTIME/" examples/grpo-pi/train.yaml examples/grpo-pi/held-out.yaml
fi

# The runs that this command has worked at: no others come back with it.
touch runs/.began
of_now() { find runs -mindepth 2 -maxdepth 2 -name metrics.jsonl -newer runs/.began -exec dirname {} \;; }

keep() {
    for run in $(of_now); do
        name=$(basename "$run")
        cp "$run/metrics.jsonl" "$OUT/$name.jsonl" 2>/dev/null
        cp "$run/held-out.jsonl" "$OUT/$name.held-out.jsonl" 2>/dev/null
        cp "$run/choice.jsonl" "$OUT/choice.jsonl" 2>/dev/null
        tail -c 200000 "$run/train.log" > "$OUT/$name.log" 2>/dev/null
    done
}

curve() {
    set -- runs/seed-*/metrics.jsonl
    [ -f "$1" ] && "$PYTHON3" examples/grpo-pi/curve.py "$@" --out "$OUT/learning"
}

# In the background, because a shell lets what runs there ignore the interrupt that ends a run in time.
while sleep 3; do keep; done &
keeping=$!
code=0
case $part in
    sft)
        timeout -k 20 -s INT "$seconds" sh -ec '
            "$PYTHON3" -m polar train sft "$@"
            "$PYTHON3" examples/grpo-pi/choose.py "$RUN" runs/warm-start
        ' sh "${SFT:-examples/grpo-pi/sft.yaml}" "$@" || code=$?
        ;;
    grpo)
        # What the start, the last step and the last measurement take is kept back from training.
        timeout -k 20 -s INT "$seconds" "$PYTHON3" -m polar train "$RUN" --out "runs/seed-$seed" \
            --seed "$seed" --seconds "$((seconds - RESERVE))" "$@" || code=$?
        ;;
    curve) ;;
    *) echo "sft, grpo or curve?"; code=2 ;;
esac
kill $keeping
keep
curve
# Each run's newest adapter, in bfloat16: small enough to come back, and to ship.
for run in $(of_now); do
    newest=$(ls -d "$run/chosen" "$run"/checkpoints/step-*/weights 2>/dev/null | sort | tail -1)
    [ -n "$newest" ] && "$PYTHON3" examples/grpo-pi/adapter.py "$newest" "$OUT/$(basename "$run")-adapter.zip"
done
exit $code
