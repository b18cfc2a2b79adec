"""What comes with the package itself: example tasks and runs, and the policy that they begin with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polar.errors import InvalidInput

EXAMPLES = Path(__file__).parent / "examples"
"""In a clone these are links to the directory `examples` of the project; a wheel holds the files."""
WARM_START = EXAMPLES / "warm-start"
"""A LoRA adapter to the default model, which has seen how such tasks are solved; examples/grpo-pi made it."""
_LEFT_OUT = ("__pycache__", ".egg-info")


def copy_examples(into: Path) -> list[Path]:
    """Write the examples below a directory; where a file there differs, refuse and write nothing."""
    found = (file for directory in EXAMPLES.iterdir() for file in directory.rglob("*") if file.is_file())
    files = sorted(file for file in found if not file.parent.name.endswith(_LEFT_OUT))
    copies = {into / file.relative_to(EXAMPLES): file.read_bytes() for file in files}
    try:
        _copy(copies)
    except OSError as error:
        raise InvalidInput(f"{into}: cannot be written to: {error.strerror}") from None
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
