"""Files that come with the package: example tasks and runs, and the warm start they use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polar.errors import InvalidInput

EXAMPLES = Path(__file__).parent / "examples"
"""In a clone this is full of links to the project's `examples` directory; a wheel holds the files."""
WARM_START = EXAMPLES / "warm-start"
"""A LoRA adapter for the default model, trained on such tasks by examples/grpo-pi."""
_LEFT_OUT = ("__pycache__", ".egg-info")


def copy_examples(into: Path) -> list[Path]:
    """Copy the examples below a directory; if a file there differs, refuse and write nothing."""
    found = (file for directory in EXAMPLES.iterdir() for file in directory.rglob("*") if file.is_file())
    files = sorted(file for file in found if not file.parent.name.endswith(_LEFT_OUT))
    copies = {into / file.relative_to(EXAMPLES): file.read_bytes() for file in files}
    try:
        _copy(copies)
    except OSError as error:
        raise InvalidInput(f"{into}: cannot write: {error.strerror}") from None
    return list(copies)


def _copy(copies: Mapping[Path, bytes]) -> None:
    changed = [path for path, data in copies.items() if path.exists() and path.read_bytes() != data]
    if changed:
        raise InvalidInput(
            f"{', '.join(map(str, changed))}: not overwritten, because the contents differ",
            hint="name another directory: polar examples DIR",
        )
    for path, data in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
