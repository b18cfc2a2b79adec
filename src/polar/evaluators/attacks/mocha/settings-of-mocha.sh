# .mocharc.cjs, which mocha loads and obeys.
plant node-liar.js liar.js
plant node-config.js .mocharc.cjs
