# An .npmrc that gives Node.js options, and another shell to npm.
plant node-liar.js liar.js
printf '%s\n' 'node-options=--require ./liar.js' script-shell=/bin/true > .npmrc
