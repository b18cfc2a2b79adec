# carry.sh DIRECTORY everything|some TEST...: make the workspace what DIRECTORY/workspace.tar holds. Of everything,
# the directories that TEST finds, and links in their place, stay as they are; of some, only what TEST finds is
# carried.
set -e
mine=$1
what=$2
shift 2
mkdir "$mine/after"
tar -x -o -f "$mine/workspace.tar" -C "$mine/after"
rm "$mine/workspace.tar"
find "$mine/after" -name .git -prune -exec rm -rf {} +
if [ "$what" = some ]; then
  find . -path ./.git -prune -o ! -type d \( "$@" \) -exec rm -f {} +
  cd "$mine/after"
  find . ! -type d ! \( "$@" \) -exec rm -f {} +
  # The name of an empty directory is the agent's as well, and a grader may count or even run it.
  find . -mindepth 1 -depth -type d ! \( "$@" \) -exec rmdir {} + 2>/dev/null || true
else
  find . -path ./.git -prune -o ! -type f \( "$@" \) -prune -o ! -type d -exec rm -f {} +
  find . -mindepth 1 -depth -type d ! -path ./.git ! -path './.git/*' -exec rmdir {} + 2>/dev/null || true
  cd "$mine/after"
  find . ! -type f \( "$@" \) -prune -exec rm -rf {} +
fi
cp -a "$mine/after/." "$OLDPWD/"
rm -rf "$mine"
