# A module of its own in the place of unittest.
plant unittest-liar unittest.py
