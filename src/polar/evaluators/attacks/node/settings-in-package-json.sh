# Settings of test runners in package.json.
plant node-liar.js liar.js
for runner in jest mocha ava babel; do
  set_in_package_json $runner '{"setupFiles": ["./liar.js"], "require": ["./liar.js"]}'
done
