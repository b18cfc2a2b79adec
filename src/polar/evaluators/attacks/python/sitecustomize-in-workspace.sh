# A start-up file of Python at the top of the workspace.
plant python-liar sitecustomize.py
