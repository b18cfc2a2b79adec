# vite.config.mts, which vite loads and obeys.
plant node-liar.js liar.js
plant node-config.mjs vite.config.mts
