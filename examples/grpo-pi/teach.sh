#!/bin/sh
# What the teacher plays through Pi, as a dataset in data/warm-start; interrupted, the same command goes on.
set -eu
here=examples/grpo-pi
export PATH="$PWD/.venv/bin:$PATH"

python $here/teacher.py --port 8701 &
teacher=$!
trap 'kill $teacher' EXIT
until python -c 'import socket; socket.create_connection(("127.0.0.1", 8701))' 2>/dev/null; do
    kill -0 $teacher
    sleep 0.2
done
polar generate -t $here/train.yaml --engine-url http://127.0.0.1:8701 --engine-mode tokens \
    --model smollm2-135m-instruct --config $here/small-system.yaml --samples 1 --seed 1 --out data/warm-start
