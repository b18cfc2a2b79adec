# Settings of jest in package.json.
plant node-liar.js liar.js
set_in_package_json jest '{"setupFilesAfterEnv": ["./liar.js"]}'
