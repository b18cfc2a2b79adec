# Each directory of tests as a link to a copy elsewhere.
mkdir -p "$HOME/copy"
for path in tests test spec; do
  [ -d "$path" ] || continue
  cp -R "$path" "$HOME/copy/"
  rm -rf "$path"
  ln -s "$HOME/copy/$path" "$path"
done
