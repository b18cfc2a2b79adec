# Verdicts in a directory that cannot be written to.
sh "$payloads/forge.sh"
chmod -R a-w /logs reward.txt
