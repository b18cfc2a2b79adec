"""Whoever follows an install hint gets this project: the distribution is `polar-rl`; `polar` is another's."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

HINT = re.compile(r"(?<![\w/.-])(polar(?:-rl)?)\[([\w,{}]+)\]")
"""A distribution with extras; `/opt/polar[ray]` is a directory, `polar.names[0]` is Python."""


def tracked_texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".js")
    names = [name for name in listed.stdout.splitlines() if name.endswith(kinds) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text() for name in names if (ROOT / name) != Path(__file__)}


def hints() -> list[tuple[str, str, str]]:
    found = tracked_texts().items()
    return [(name, hint[1], hint[2]) for name, text in found for hint in HINT.finditer(text)]


def test_every_hint_installs_this_distribution() -> None:
    assert len(hints()) >= 19
    assert {distribution for _, distribution, _ in hints()} == {PROJECT["name"]} == {"polar-rl"}


def test_every_hint_names_extras_that_exist() -> None:
    extras = {extra for _, _, listed in hints() for extra in listed.split(",") if "{" not in extra}
    assert extras <= set(PROJECT["optional-dependencies"])


def test_no_hint_installs_the_plain_name() -> None:
    plain = re.compile(r"pip install (?:-\S+ )*['\"]?polar(?![\w/-])")
    assert not [name for name, text in tracked_texts().items() if plain.search(text)]
