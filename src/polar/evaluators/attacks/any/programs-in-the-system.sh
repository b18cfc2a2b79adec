# Programs of common names in the system's own directories.
for name in $programs; do
  plant program.sh "/usr/local/sbin/$name" "/usr/local/bin/$name"
done 2>/dev/null
