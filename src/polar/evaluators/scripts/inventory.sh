# inventory.sh INSTALLED EXPRESSION...: print the paths at the top, an empty one, and the paths that guards
# look at, each ended by a null byte. INSTALLED finds directories that are passed over.
# The agent may have locked directories, to hide or to stay.
chmod -R u+rwX . 2>/dev/null
chmod u+rwx "$TMPDIR" "$HOME" 2>/dev/null
installed=$1
shift
find . -mindepth 1 -maxdepth 1 -print0
printf '\0'
find . -path './.git/hooks/*' ! -name '*.sample' -print0
find . -path ./.git -prune -o -name node_modules -prune -print0
find . -path ./.git -prune -o -type d \( $installed \) -prune -o ! -type d \( "$@" \) -print0
printf 'end of the list'
