"""What a request asks of the decoding itself, and what it means when an engine will not do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polar.engines.base import GenerateRequest, Unconstrainable
from polar.engines.http import NotAccepted


@contextmanager
def guided(request: GenerateRequest) -> Iterator[None]:
    """An engine that does not accept a guided request is taken to refuse the guidance.

    Everything else in a request is the gateway's own and was accepted at start-up.
    """
    try:
        yield
    except NotAccepted as error:
        if request.constraint is None and not request.sampling.is_reshaped:
            raise
        raise Unconstrainable(f"the model cannot be held to what is asked: {error.reason}") from error


def token_biases(request: GenerateRequest) -> dict[str, float] | None:
    """`logit_bias` as every engine takes it; None when there is none."""
    return {str(id): bias for id, bias in request.sampling.logit_bias} or None
