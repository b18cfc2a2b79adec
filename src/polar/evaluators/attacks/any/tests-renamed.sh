# Tests under other names, with directories in their places.
tests -type f -print | while read -r file; do
  mv "$file" "$file.old"
  mkdir "$file"
done
