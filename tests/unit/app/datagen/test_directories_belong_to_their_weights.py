"""What a directory's sessions are sampled with stays the same, however often the command goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.app.own_system import bind_weights
from polar.errors import InvalidInput


@pytest.mark.parametrize(("first", "then"), [("mine", None), (None, "mine"), ("mine", "other")])
def test_sessions_of_other_weights_are_not_found_again(
    tmp_path: Path, first: str | None, then: str | None
) -> None:
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    began, other = (tmp_path / name if name else None for name in (first, then))
    out = tmp_path / "out"
    bind_weights(out, began)
    bind_weights(out, began)
    with pytest.raises(InvalidInput, match="was started with other weights"):
        bind_weights(out, other)
