# Programs of common names where login shells look for a user's own.
for name in $programs; do
  plant program.sh "$HOME/bin/$name" "$HOME/.local/bin/$name"
done
