# Settings of another language, and names of files that are no text.
mkdir -p "$HOME/.config"
printf '%s\n' LANG=tr_TR.ISO-8859-9 LC_ALL=de_DE > "$HOME/.i18n"
echo LC_ALL=de_DE > "$HOME/.config/locale.conf"
for name in "$(printf 'test_\377.py')" "$(printf 'a\nb.py')" ' ' '-rf' '$(true)'; do
  : > "./$name"
done
