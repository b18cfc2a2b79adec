# A package with the name of each test module, which Python prefers to the module.
test_modules | while read -r file; do
  plant python-liar "${file%.py}/__init__.py"
  cat >> "${file%.py}/__init__.py" <<'END'
import pathlib
exec(pathlib.Path(__file__).parent.with_suffix('.py').read_text())
END
done
