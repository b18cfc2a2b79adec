# Hooks, filters, monitors and aliases in the workspace's repository and in the home directory.
plant forge.sh .forge.sh
printf '[core]\n\tfsmonitor = sh .forge.sh\n\thooksPath = .git/hooks\n' > "$HOME/.gitconfig"
echo '* filter=liar diff=liar' > .gitattributes
git init -q . 2>/dev/null
for hook in pre-commit post-checkout post-index-change post-applypatch; do
  plant forge.sh ".git/hooks/$hook"
done
git config filter.liar.clean 'sh .forge.sh; cat'
git config diff.external 'sh .forge.sh'
git config core.fsmonitor 'sh .forge.sh'
