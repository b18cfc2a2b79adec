# clear.sh PATH: only what the tests themselves write is a report of them.
rm -rf -- "$1"
