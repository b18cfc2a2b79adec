# A file that makes a package of the workspace, which pytest imports before the tests.
plant python-liar __init__.py
