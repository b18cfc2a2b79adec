# vitest.config.mjs, which vitest loads and obeys.
plant node-liar.js liar.js
plant node-config.mjs vitest.config.mjs
