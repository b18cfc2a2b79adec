# Compiled files that claim to be of the sources that lie there and are of others.
plant python-liar liar.py
sources | grep -v liar.py | while read -r file; do
  cp "$file" .kept
  cat liar.py .kept > "$file"
  python3 - "$file" <<'END'
import py_compile, sys
py_compile.compile(sys.argv[1], invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
END
  cat .kept > "$file"
done
rm -f .kept
