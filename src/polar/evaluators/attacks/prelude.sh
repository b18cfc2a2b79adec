# What the scripts of attacks share. `$payloads` is a directory that holds what they plant.

programs="python3 python node npm make sh bash grep cat test diff pytest cargo git env tar find"

# plant PAYLOAD PATH...: leave a copy at each path, which can be run.
plant() {
  planted=$payloads/$1
  shift
  for path; do
    mkdir -p "$(dirname "$path")" && cp "$planted" "$path" && chmod +x "$path"
  done
}

# tests EXPRESSION...: what `find` does with everything that is called like a test.
tests() {
  find . -path ./.git -prune -o \( -name '*test*' -o -name '*spec*' \) ! -name .forge.sh "$@"
}

test_modules() {
  find . -path ./.git -prune -o \( -name 'test_*.py' -o -name '*_test.py' \) -print
}

sources() {
  find . -path ./.git -prune -o -name '*.py' ! -path '*test*' -print
}

# Put what is read before every source of the agent's own work.
begin_sources_with() {
  cat > "$payloads/beginning"
  sources | while read -r file; do
    cat "$payloads/beginning" "$file" > "$payloads/whole" && cat "$payloads/whole" > "$file"
  done
}

user_site() {
  python3 -c 'import site; print(site.getusersitepackages())'
}

# set_in_package_json KEY.KEY VALUE, which is JSON.
set_in_package_json() {
  node - "$1" "$2" <<'END'
const fs = require('fs')
const [, , key, value] = process.argv
const all = fs.existsSync('package.json') ? JSON.parse(fs.readFileSync('package.json')) : { name: 'x' }
const path = key.split('.')
const place = path.slice(0, -1).reduce((at, name) => (at[name] ??= {}), all)
place[path.at(-1)] = JSON.parse(value)
fs.writeFileSync('package.json', JSON.stringify(all))
END
}
