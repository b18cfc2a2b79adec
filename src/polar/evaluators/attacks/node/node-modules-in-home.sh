# Modules in the home directory, where Node.js looks last.
plant node-liar.js "$HOME/.node_modules/chai/index.js" "$HOME/.node_libraries/chai/index.js"
