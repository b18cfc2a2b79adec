"""How a request's tool choice and output format bind its completion: by a constraint, by a stop, or not."""

from __future__ import annotations

from dataclasses import dataclass

from polar.dialects.base import Refusal, RequestRefused
from polar.errors import InvalidInput
from polar.models.chat import ChatRequest, ToolChoice, ToolUse
from polar.rendering.base import Renderer
from polar.rendering.constraints import Constraint, constraint_of
from polar.rendering.tool_limits import FIRST_CALL_ENDS


@dataclass(frozen=True, slots=True)
class Guidance:
    constraint: Constraint | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the turn, beside those the harness asked for."""

    @property
    def record(self) -> dict[str, str]:
        """What a reader of the recording must know: the logprobs are those of a masked distribution."""
        return {"constraint": self.constraint.kind} if self.constraint else {}


def guidance_for(request: ChatRequest, renderer: Renderer) -> Guidance:
    """RequestRefused where the model's family cannot be bound so."""
    choice = request.tool_choice
    if choice == ToolChoice() and request.output is None:
        return Guidance()
    try:
        constraint = constraint_of(request, renderer.form)
    except InvalidInput as error:
        field = "response_format" if request.output is not None else "tool_choice"
        raise RequestRefused(Refusal.MALFORMED, error.message, field=field) from None
    may_call = constraint is None and choice.use is ToolUse.AUTO and bool(request.tools)
    ends_early = may_call and not choice.parallel and renderer.form.writes_calls
    return Guidance(constraint, (FIRST_CALL_ENDS,) if ends_early else ())
