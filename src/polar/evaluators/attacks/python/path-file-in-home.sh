# A path file that runs code, in the user's own site-packages.
plant python-liar "$(user_site)/liar.py"
echo 'import liar' > "$(user_site)/liar.pth"
