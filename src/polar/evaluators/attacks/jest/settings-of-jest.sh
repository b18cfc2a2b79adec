# jest.config.js, which jest loads and obeys.
plant node-liar.js liar.js
plant node-config.js jest.config.js
