# A conftest at the top of the workspace.
plant pytest-liar conftest.py
