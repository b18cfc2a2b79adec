# A start-up file in the user's own site-packages.
plant python-liar "$(user_site)/usercustomize.py"
