"""The trainers' own packages, which Polar does not depend on: found when a bridge is imported."""

from __future__ import annotations

import importlib
from typing import Any

from polar.errors import NotInstalled


def trainer_module(name: str, *, hint: str) -> Any:
    """The module of a trainer's package that holds the types of its contract."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise NotInstalled(f"this bridge needs {package}: {error}", hint=hint) from error
