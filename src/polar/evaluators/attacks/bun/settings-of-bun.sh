# bunfig.toml, which bun loads and obeys.
plant node-liar.js liar.js
printf '%s\n' 'preload = ["./liar.js"]' '[test]' 'preload = ["./liar.js"]' > bunfig.toml
