# So many files that nobody looks at them all.
mkdir -p many
cd many
i=0
while [ $i -lt 6000 ]; do echo "$i.pth"; i=$((i + 1)); done | xargs touch
