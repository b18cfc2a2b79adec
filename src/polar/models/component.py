"""A named extension with its options: the form in which harnesses, runtimes and so on cross the network."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, field_validator

M = TypeVar("M", bound=BaseModel)

_NAME = re.compile(r"^[a-z][a-z0-9_]{0,63}$")


class Frozen(BaseModel):
    """Base of every record that crosses a room or the network: immutable, unknown keys are errors.

    Numbers are finite: JSON has no other, and one would come back as null.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def view(kind: type[M], source: Any, **others: Any) -> M:
    """Build the model from the fields of `source`, ignoring any others."""
    own = {name for name in kind.model_fields if name not in others and hasattr(source, name)}
    return kind(**{name: getattr(source, name) for name in own}, **others)


class Component(Frozen):
    """`{name, options}`; a bare string stands for a name without options."""

    name: str = Field(json_schema_extra={"pattern": _NAME.pattern})
    """The registered name."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Validated against the named component's own options model when the task is submitted."""

    @field_validator("name")
    @classmethod
    def _well_formed(cls, name: str) -> str:
        if _NAME.match(name):
            return name
        likely = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        meant = f"; did you mean {likely!r}?" if _NAME.match(likely) else ""
        raise ValueError(
            f"{name[:64]!r} is not a valid name: lower-case letters, digits and underscores{meant}"
        )


def _from_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Named = Annotated[Component, BeforeValidator(_from_name)]
