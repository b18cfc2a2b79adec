# Verdicts in every place where one may be read.
sh "$payloads/forge.sh"
