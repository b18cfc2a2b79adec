# Takes the key off the input, so that no program that the command starts can read it.
IFS= read -r polar_key
{ true > /dev/stdin; } 2>/dev/null
exec < /dev/null
reward() { printf '\n%s %s\n' "$polar_key" "$*"; }
