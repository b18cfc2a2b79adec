# closed-shell.sh PATH: a shell into whose memory nobody looks. The kernel closes that of programs run from
# files that their user may not read; else a program of the agent's that the shell starts could trace its parent.
mkdir -p "${1%/*}" && cp /bin/sh "$1" && chmod 0111 "$1" && "$1" -c true
