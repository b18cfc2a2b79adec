# So many files that steer Python that nobody looks at them all.
plant python-liar liar.py
mkdir -p many
cd many
i=0
while [ $i -lt 6000 ]; do echo 'import liar' > "$i.pth"; i=$((i + 1)); done
cd ..
