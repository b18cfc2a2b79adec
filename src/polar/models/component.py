"""A named extension with its options: the form in which harnesses, runtimes and so on cross the network."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue


class Frozen(BaseModel):
    """Base of every record that crosses a room or the network: immutable, unknown keys are errors.

    Numbers are finite: JSON has no other, and one would come back as null.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Component(Frozen):
    """`{name, options}`; a bare string stands for a name without options."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")
    """As it is registered."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Validated against the named component's own options model when the task is submitted."""


def _from_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Named = Annotated[Component, BeforeValidator(_from_name)]
