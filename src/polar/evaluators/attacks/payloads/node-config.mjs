import './liar.js'
export default {test: {setupFiles: ['./liar.js']}}
