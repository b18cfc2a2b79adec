require('./liar.js')
module.exports = {setupFiles: ['./liar.js'], require: ['./liar.js']}
