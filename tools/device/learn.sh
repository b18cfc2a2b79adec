#!/bin/sh
# The learning proof on the GPU machine, after unpack.sh: warm start, then GRPO, as far as the time goes.
#   OUT=dir sh tools/device/learn.sh sft 300        the warm start, and which of its checkpoints is taken
#   OUT=dir sh tools/device/learn.sh grpo 540       GRPO for so many seconds; again: it goes on
# More words after the seconds are passed to `polar train`, for example --out runs/seed-1.
# Everything worth keeping is copied to $OUT while it runs.
set -u
. .device/env
: "${OUT:=.device/out}"
mkdir -p "$OUT" runs
export RUN="${RUN:-examples/grpo-pi/gpu.yaml}"
part=$1
seconds=${2:-570}
shift; [ $# -gt 0 ] && shift
if [ "$RUNTIME" != bubblewrap ]; then
    sed -i "s/runtime: bubblewrap/runtime: $RUNTIME/" examples/grpo-pi/train.yaml examples/grpo-pi/held-out.yaml
fi

# The runs that this command has worked at: no others come back with it.
touch .device/began
of_now() { find runs -mindepth 2 -maxdepth 2 -name metrics.jsonl -newer .device/began -exec dirname {} \;; }

keep() {
    for run in $(of_now); do
        name=$(basename "$run")
        cp "$run/metrics.jsonl" "$OUT/$name.jsonl" 2>/dev/null
        cp "$run/choice.jsonl" "$OUT/choice.jsonl" 2>/dev/null
        tail -c 200000 "$run/train.log" > "$OUT/$name.log" 2>/dev/null
    done
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
    grpo) timeout -k 20 -s INT "$seconds" "$PYTHON3" -m polar train "$RUN" "$@" || code=$? ;;
    *) echo "sft or grpo?"; code=2 ;;
esac
kill $keeping
keep
# Each run's newest adapter, in bfloat16: small enough to come back, and to ship.
for run in $(of_now); do
    newest=$(ls -d "$run/chosen" "$run"/checkpoints/step-*/weights 2>/dev/null | sort | tail -1)
    [ -n "$newest" ] && "$PYTHON3" tools/device/adapter.py "$newest" "$OUT/$(basename "$run")-adapter.zip"
done
exit $code
