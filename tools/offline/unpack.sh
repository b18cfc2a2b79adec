#!/bin/sh
# Lays out, on a machine without a network, what pack.py packed: run in the repository's root.
#   sh tools/offline/unpack.sh && . .offline/env
# Everything stays below .offline; what the machine's own Python has is used from there.
set -eu
root=$(pwd)
bundle=$root/.offline
python=${PYTHON:-python3}
mkdir -p "$bundle/joined" "$bundle/site" "$bundle/cache/models"

echo "joining parts"
"$python" - "$bundle" <<'PY'
import hashlib, sys
from pathlib import Path

bundle = Path(sys.argv[1])
for first in sorted(bundle.glob("part-*/**/*.00")):
    name = first.relative_to(bundle).parts[1:]
    target = bundle / "joined" / Path(*name).with_suffix("")
    target.parent.mkdir(parents=True, exist_ok=True)
    pieces = sorted(bundle.glob(f"part-*/{Path(*name).with_suffix('')}.[0-9][0-9]"), key=lambda p: p.suffix)
    target.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
[sums] = bundle.glob("part-*/sums")
for line in sums.read_text().splitlines():
    digest, name = line.split("  ")
    file = bundle / "joined" / name
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
        sys.exit(f"error: {name} is missing or damaged: carry every part")
PY

echo "unpacking wheels"
"$python" - "$bundle" "$root" <<'PY'
import sys, tomllib, zipfile
from pathlib import Path

bundle, root = map(Path, sys.argv[1:])
site = bundle / "site"
for wheel in sorted((bundle / "joined" / "wheels").glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            inside = Path(member.filename)
            if inside.parts[0].endswith(".data"):
                if inside.parts[1] not in ("purelib", "platlib"):
                    continue
                inside = Path(*inside.parts[2:])
            target = site / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
            if member.external_attr >> 16 & 0o111:
                target.chmod(0o755)
# Polar and the plug-ins of its examples are used as they lie here; their extensions are found by these files.
for home in (root, root / "examples" / "file-shell", root / "examples" / "public-tasks"):
    project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = {"console_scripts": project.get("scripts", {}), **project["entry-points"]}
    (info / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()
        )
    )
PY

cat > "$bundle/env" <<ENV
export PYTHONPATH="$bundle/site:$root/src:$root/examples/file-shell:$root/examples/public-tasks\${PYTHONPATH:+:\$PYTHONPATH}"
export POLAR_CACHE="$bundle/cache"
export HF_HUB_OFFLINE=1
export PYTHON3="$python"
polar() { "$python" -m polar "\$@"; }
ENV
. "$bundle/env"

echo "unpacking Node.js and harnesses"
for archive in "$bundle"/joined/cache/*.tar.xz; do
    "$python" -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])" "$archive" "$bundle/cache"
done

echo "converting the model"
"$python" - "$bundle" <<'PY'
import sys
from pathlib import Path

from polar.assets.cache import asset
from polar.engines.embedded import weights

gguf = Path(sys.argv[1]) / "joined" / Path(weights.GGUF).name
assert weights._sha256(gguf) == weights.GGUF_SHA256, "another GGUF than the one that is pinned"
print(asset(weights._DEFAULT_ASSET, lambda into: weights._convert(gguf, into)))
PY

if [ -d "$bundle/joined/extra" ]; then
    cp -R "$bundle/joined/extra/." "$root"
fi

echo "checking"
"$bundle"/cache/node-*/bin/node --version
polar --help >/dev/null && echo "polar starts"
runtime=$("$python" - <<'PY'
import asyncio, sys

from polar.runtimes.bubblewrap import BubblewrapRuntime

reason = asyncio.run(BubblewrapRuntime.unavailable())
print("bubblewrap" if reason is None else "process")
if reason is not None:
    print(f"no bubblewrap here, tasks run as plain processes: {reason}", file=sys.stderr)
PY
)
echo "export RUNTIME=$runtime" >> "$bundle/env"
echo "runtime: $runtime"
command -v cc gcc >/dev/null || echo "no C compiler: torch.compile will not work here"
"$python" -c "import torch; print('torch', torch.__version__, 'cuda', torch.cuda.is_available())"
