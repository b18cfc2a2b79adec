# harbor-open.sh LOGS: whether the verifier can have written its reward. Code that it ran may have left another
# and locked it.
for path in "$1" "$1/verifier" "$1/verifier/reward.json" "$1/verifier/reward.txt"; do
  [ ! -e "$path" ] || [ -w "$path" ] || exit 1
done
