"""Runs unittest with the workspace last on the path: nothing there hides the standard library."""

import sys
import unittest

sys.dont_write_bytecode = True
sys.path.append("/app")
unittest.main(module=None, argv=["run.py", "-v", *sys.argv[1:]])
