# Settings of mocha in package.json.
plant node-liar.js liar.js
set_in_package_json mocha '{"require": ["./liar.js"]}'
