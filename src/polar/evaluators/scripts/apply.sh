# apply.sh PATCH
git apply --whitespace=nowarn -p1 "$1"
