# A link in the place of a module of the standard library.
plant python-liar data/notes.txt
ln -s data/notes.txt traceback.py
