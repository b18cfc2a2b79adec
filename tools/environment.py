"""Creates `.venv`: linked from the user's cache if the same environment exists there, with pip otherwise.

    python3 tools/environment.py engine,train,dev

Files are hard links if cache and clone share a file system, and copies otherwise, so a second clone is ready
in seconds and takes little space. Uses only the standard library: nothing else is installed yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OWN = (ROOT, *(ROOT / "examples" / name for name in ("file-shell", "public-tasks")))
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / ".environment"
CONSTRAINTS = ROOT / "constraints.txt"
PIP = (str(BIN / "python"), "-m", "pip", "--disable-pip-version-check")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit("error: Polar requires Python 3.11 or newer; choose one with: make PYTHON=python3.12 …")
    if os.name != "posix":
        sys.exit("error: Polar runs on Linux and macOS; on Windows, use WSL")
    make_environment(sys.argv[1].split(","))
    install_polar()


def make_environment(extras: list[str]) -> None:
    """Install every dependency, unless it is already there."""
    wanted = key(extras)
    if wanted in stamps():
        return
    cached = cached_as(wanted)
    with locked(cached):
        if cached.is_dir():
            say(f"linking {VENV.name} from {cached} …")
            link_environment(cached)
        else:
            say(f"installing Python packages ({', '.join(extras)}), a few minutes the first time …")
            install_environment(extras)
            keep_environment(cached)
    # An environment with several extras also serves requests for fewer of them.
    stamp(*(key(extras[:count]) for count in range(1, len(extras) + 1)))


def install_polar() -> None:
    """Install the project and its examples' plug-ins from this clone, again if their metadata changed."""
    metadata = hashlib.sha256(b"".join((path / "pyproject.toml").read_bytes() for path in OWN)).hexdigest()[
        :16
    ]
    if metadata not in stamps():
        editable = [word for path in OWN for word in ("--editable", str(path))]
        pip("install", "--quiet", "--no-deps", "--no-build-isolation", *editable)
        stamp(metadata)


def stamps() -> list[str]:
    return STAMP.read_text().split() if STAMP.exists() and (BIN / "python").exists() else []


def stamp(*names: str) -> None:
    STAMP.write_text("\n".join([*stamps(), *names]) + "\n")


def key(extras: list[str]) -> str:
    """Return a name for an environment, derived from everything that determines its content."""
    about = project()
    asked = [about["dependencies"], *(about["optional-dependencies"][extra] for extra in extras)]
    parts = (sys.version, sysconfig.get_platform(), str(extras), str(asked), CONSTRAINTS.read_text())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    import tomllib  # not at the top, so that older Pythons reach the message above

    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def cache_dir() -> Path:
    return Path(os.environ.get("POLAR_CACHE") or Path.home() / ".cache" / "polar").expanduser()


def cached_as(name: str) -> Path:
    return cache_dir() / "environments" / name


@contextmanager
def locked(cached: Path) -> Iterator[None]:
    cached.parent.mkdir(parents=True, exist_ok=True)
    with (cached.parent / f".{cached.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install_environment(extras: list[str]) -> None:
    """Install with pip, starting from the largest part that is in the cache.

    Existing packages are removed first, since the cache would pass them on. Polar itself is installed later,
    so that the cache does not contain this clone.
    """
    parts = [cached_as(key(extras[:count])) for count in range(len(extras) - 1, 0, -1)]
    if part := next((part for part in parts if part.is_dir()), None):
        link_environment(part)
    else:
        make_venv("--clear")
    with tempfile.TemporaryDirectory() as directory:
        # Only the project's metadata, from which pip installs the dependencies.
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, directory)
        Path(directory, "src").mkdir()
        target = f"{directory}[{','.join(extras)}]"
        pip("install", "--quiet", "--constraint", str(CONSTRAINTS), "setuptools", target)
    pip("uninstall", "--quiet", "--yes", project()["name"])


def keep_environment(cached: Path) -> None:
    """Store the fresh environment in the cache, atomically."""
    part = Path(tempfile.mkdtemp(prefix=f".{cached.name}.part-", dir=cached.parent))
    try:
        link_tree(site_packages(), part / "site-packages")
        link_tree(BIN, part / "bin")
        part.rename(cached)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def link_environment(cached: Path) -> None:
    make_venv("--clear", "--without-pip")
    shutil.rmtree(site_packages(), ignore_errors=True)
    link_tree(cached / "site-packages", site_packages())
    for script in sorted((cached / "bin").iterdir()):
        target = BIN / script.name
        # Modules among the scripts, such as jmespath's, have a directory of compiled files.
        if not script.is_file() or script.is_symlink() or target.exists():
            continue
        if script.read_bytes()[:2] == b"#!":
            # Scripts name the interpreter of the environment they were created in.
            body = script.read_bytes().split(b"\n", 1)[1]
            target.write_bytes(b"#!" + os.fsencode(BIN / "python") + b"\n" + body)
            target.chmod(0o755)
        else:
            link(script, target)


def link_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True, copy_function=link)


def link(source: os.PathLike[str] | str, target: os.PathLike[str] | str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target)


def site_packages() -> Path:
    return VENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def make_venv(*options: str) -> None:
    if subprocess.run([sys.executable, "-m", "venv", *options, str(VENV)]).returncode:
        sys.exit("error: Python's venv module does not work here (on Debian: apt-get install python3-venv)")


def pip(*arguments: str) -> None:
    run = subprocess.run([*PIP, *arguments])
    if run.returncode:
        sys.exit(
            f"error: pip {arguments[0]} failed; check the network and pip's index settings"
            " (pip config list), then run make again"
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
