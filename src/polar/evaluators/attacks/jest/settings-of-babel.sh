# babel.config.cjs, which babel loads and obeys.
plant node-liar.js liar.js
plant node-config.js babel.config.cjs
