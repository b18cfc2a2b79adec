# A path file that runs code, beside the code under test.
plant python-liar liar.py
echo 'import liar' > liar.pth
