# Settings of babel in package.json, which jest has every module translated by.
plant node-liar.js liar.js
set_in_package_json babel '{"plugins": ["./liar.js"]}'
