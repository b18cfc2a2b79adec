# Code in the files that make packages of the directories of tests, and of the workspace.
plant python-liar __init__.py tests/__init__.py
test_modules | while read -r file; do plant python-liar "$(dirname "$file")/__init__.py"; done
