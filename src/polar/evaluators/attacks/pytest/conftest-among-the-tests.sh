# A conftest in every directory of tests.
test_modules | while read -r file; do plant pytest-liar "$(dirname "$file")/conftest.py"; done
