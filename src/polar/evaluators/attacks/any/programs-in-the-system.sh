# Programs of common names in the directories of the system, and of the environment that an image brings.
for place in /usr/local/sbin /usr/local/bin /opt/venv/bin /opt/conda/bin; do
  [ -w "$place" ] || continue
  for name in $programs; do
    plant program.sh "$place/$name"
  done
done
