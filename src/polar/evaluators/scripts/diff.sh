# diff.sh DIRECTORY BYTES PATHSPEC...: DIRECTORY/patch.diff, cut off after BYTES, leads from the workspace to
# what DIRECTORY/workspace.tar holds. Exit code 86: there is no git.
command -v git > /dev/null || exit 86
set -e
before=$PWD
mine=$1
limit=$2
shift 2
mkdir "$mine/after"
tar -x -o -f "$mine/workspace.tar" -C "$mine/after" && rm "$mine/workspace.tar"
find "$mine/after" -name .git -prune -exec rm -rf {} +
export GIT_DIR="$mine/git"
git init --quiet --template= && mkdir -p "$GIT_DIR/info"
git config core.autocrlf false && git config core.excludesFile /dev/null && git config gc.auto 0
echo '* -text -filter -ident -working-tree-encoding !diff' > "$GIT_DIR/info/attributes"
# Never part of a patch unless they were there before; what the project's .gitignore names comes on top.
printf '%s\n' '__pycache__/' '*.pyc' '.pytest_cache/' 'node_modules/' > "$GIT_DIR/info/exclude"
git --work-tree="$before" add --all --force . && old=$(git write-tree)
git read-tree "$old"
cd "$mine/after"
git --work-tree="$mine/after" add --all . && new=$(git write-tree)
git diff-tree -r --patch --binary --full-index --no-ext-diff --no-textconv --no-renames \
    "$old" "$new" -- "$@" | head -c "$limit" > "$mine/patch.diff"
rm -rf "$mine/after" "$mine/git"
