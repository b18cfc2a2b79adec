# A script that npm runs before the tests and that leaves verdicts.
plant forge.sh forge.sh
plant node-liar.js liar.js
set_in_package_json scripts.pretest \
  '"sh forge.sh; for file in $(find . -name \"*.test.js\"); do cat liar.js > $file; done"'
