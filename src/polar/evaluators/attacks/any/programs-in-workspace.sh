# Programs of common names in the workspace, its bin and its virtual environment.
for name in $programs; do
  for place in . bin .venv/bin venv/bin node_modules/.bin; do
    [ -e "$place/$name" ] || plant program.sh "$place/$name"
  done
done
