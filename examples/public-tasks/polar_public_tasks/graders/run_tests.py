"""Runs a package's tests with the pytest that lies beside this file: `run_tests.py CODE TEST...`.

The code under test is looked for after the standard library and pytest, which it can then not replace, and
before what is installed, which may be another release of it.
"""

import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
places = [path for path in sys.path if os.path.abspath(path) != here]
installed = next((number for number, path in enumerate(places) if path.endswith("-packages")), len(places))
places[installed:installed] = [os.path.join(here, "pytest.zip"), os.path.abspath(sys.argv[1]), os.getcwd()]
sys.path[:] = places

import pytest  # noqa: E402

SETTINGS = ["-c", os.path.join(here, "pytest.ini"), "--rootdir", os.getcwd(), "--import-mode", "importlib"]
# A test that the agent wrote beside the others and that does not load keeps none of them from running.
# Nor may code under test call a test a known failure, which would pass: these packages have none.
REPORT = ["--continue-on-collection-errors", "--runxfail", "-rA", "-q", "--tb", "long"]
sys.exit(pytest.main([*SETTINGS, *REPORT, *sys.argv[2:]]))
