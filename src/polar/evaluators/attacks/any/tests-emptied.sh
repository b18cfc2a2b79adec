# Tests without content.
tests -type f -print | while read -r file; do : > "$file"; done
