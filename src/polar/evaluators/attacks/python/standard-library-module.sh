# Modules in the place of what every test runner imports from the standard library.
plant python-liar argparse.py difflib.py
