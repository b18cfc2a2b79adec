"""A bridge without its trainer's package says what to install, and Polar does without all of them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from polar.errors import NotInstalled

PACKAGES = {"verl": "verl", "slime": "slime", "skyrl": "skyrl", "prime_rl": "prime_rl", "areal": "areal"}


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_bridge_without_its_trainer_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None in sys.modules is a package that is not there, also where it is.
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(NotInstalled, match=f"needs {PACKAGES[name]}.*install"):
        importlib.import_module(f"polar.bridges.{name}")


def test_what_bridges_share_needs_neither_torch_nor_a_trainer() -> None:
    program = (
        "import sys, polar.bridges.sessions, polar.bridges.nemo_gym\n"
        "print([name for name in ('torch', 'transformers', 'trl', 'verl') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
