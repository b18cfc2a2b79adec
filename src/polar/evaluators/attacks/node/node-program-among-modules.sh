# A program called node where npm looks for programs first.
plant program.sh node_modules/.bin/node
