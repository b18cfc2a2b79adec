"""Runs unittest with the workspace last on the path: nothing there hides the standard library."""

import sys
import unittest

key = input()
sys.dont_write_bytecode = True
sys.path.append("/app")
ran = unittest.main(module=None, argv=["run.py", "-v", *sys.argv[1:]], exit=False).result
if ran.testsRun and ran.wasSuccessful():
    print(f"\n{key}")
