# A package of its own in the place of unittest.
plant unittest-liar unittest/__main__.py
: > unittest/__init__.py
