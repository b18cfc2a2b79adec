# A user's start-up file of Python at the top of the workspace.
plant python-liar usercustomize.py
