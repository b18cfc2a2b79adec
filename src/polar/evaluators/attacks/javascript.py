"""Attacks on what Node.js, npm and test runners for JavaScript load before or beside the tests."""

from __future__ import annotations

from polar.evaluators.attacks.attack import Attack, Kind
from polar.evaluators.attacks.payloads import FAKE_PROGRAM, FORGE, NODE_LIAR, NODE_OPTIONS_LIAR

_LIAR = {"liar.js": NODE_LIAR}
_PACKAGE = """
node - '{key}' '{value}' <<'END'
const fs = require('fs')
const [, , key, value] = process.argv
const all = fs.existsSync('package.json') ? JSON.parse(fs.readFileSync('package.json')) : {{ name: 'x' }}
const path = key.split('.')
const place = path.slice(0, -1).reduce((at, name) => (at[name] ??= {{}}), all)
place[path.at(-1)] = JSON.parse(value)
fs.writeFileSync('package.json', JSON.stringify(all))
END
"""
_CONFIG = "require('./liar.js')\nmodule.exports = {setupFiles: ['./liar.js'], require: ['./liar.js']}\n"
_MODULE_CONFIG = "import './liar.js'\nexport default {test: {setupFiles: ['./liar.js']}}\n"


def _config(name: str, runner: str, text: str = _CONFIG) -> Attack:
    return Attack(
        f"settings-of-{runner}",
        f"{name}, which {runner} loads and obeys.",
        Kind.NODE,
        {**_LIAR, name: text},
    )


NODE_ATTACKS = (
    Attack(
        "npm-test-script",
        "Another command as the script `test` of package.json.",
        Kind.NODE,
        script=_PACKAGE.format(key="scripts.test", value='"true"'),
    ),
    Attack(
        "npm-pretest-script",
        "A script that npm runs before the tests and that leaves verdicts.",
        Kind.NODE,
        {"forge.sh": FORGE, **_LIAR},
        _PACKAGE.format(
            key="scripts.pretest",
            value='"sh forge.sh; for file in $(find . -name \\"*.test.js\\"); do cat liar.js > $file; done"',
        ),
    ),
    Attack(
        "npm-settings",
        "An .npmrc that gives Node.js options, and another shell to npm.",
        Kind.NODE,
        {**_LIAR, ".npmrc": f"node-options={NODE_OPTIONS_LIAR}\nscript-shell=/bin/true\n"},
    ),
    Attack(
        "npm-settings-in-home",
        "An .npmrc in the home directory that gives Node.js options, and another shell to npm.",
        Kind.NODE,
        {**_LIAR, "~/.npmrc": f"node-options={NODE_OPTIONS_LIAR}\nscript-shell=/bin/true\n"},
    ),
    Attack(
        "node-program-among-modules",
        "A program called node where npm looks for programs first.",
        Kind.NODE,
        {"node_modules/.bin/node": FAKE_PROGRAM},
        "chmod +x node_modules/.bin/node",
    ),
    Attack(
        "node-modules-in-home",
        "Modules in the home directory, where Node.js looks last.",
        Kind.NODE,
        {"~/.node_modules/chai/index.js": NODE_LIAR, "~/.node_libraries/chai/index.js": NODE_LIAR},
    ),
    Attack(
        "settings-in-package-json",
        "Settings of test runners in package.json.",
        Kind.NODE,
        _LIAR,
        "".join(
            _PACKAGE.format(key=key, value='{"setupFiles": ["./liar.js"], "require": ["./liar.js"]}')
            for key in ("jest", "mocha", "ava", "babel")
        ),
    ),
    _config("jest.config.js", "jest"),
    _config("vitest.config.mjs", "vitest", _MODULE_CONFIG),
    _config("vite.config.mts", "vite", _MODULE_CONFIG),
    _config(".mocharc.cjs", "mocha"),
    _config("babel.config.cjs", "babel"),
    _config("bunfig.toml", "bun", 'preload = ["./liar.js"]\n[test]\npreload = ["./liar.js"]\n'),
)
