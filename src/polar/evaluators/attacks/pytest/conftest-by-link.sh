# A conftest that is a link to a file that is called otherwise.
plant pytest-liar notes.txt
ln -s notes.txt conftest.py
