"""Several sessions in one body: a line of JSON that says what follows, then the bytes of each."""

from __future__ import annotations

from pydantic import ValidationError

from polar.config.settings import explain
from polar.errors import InvalidInput
from polar.models.views import Deliveries
from polar.store.delivery import Delivered
from polar.store.store import Package


def unpacked(body: bytes) -> list[Package]:
    """The packages of a body; InvalidInput if it does not hold exactly what its first line says."""
    head, found, _ = body.partition(b"\n")
    try:
        deliveries = Deliveries.model_validate_json(head).deliveries
    except ValidationError as error:
        raise InvalidInput(explain(error)) from None
    position = len(head) + len(found)
    packages: list[Package] = []
    for delivery in deliveries:
        parts: list[bytes | None] = []
        for length in (delivery.recording_bytes, delivery.artifacts_bytes):
            parts.append(None if length is None else body[position : position + length])
            position += length or 0
        delivered = Delivered(delivery.session_id, delivery.key, delivery.result, delivery.entered)
        packages.append(Package(delivered, *parts))
    if position != len(body):
        raise InvalidInput(f"body: has {len(body)} bytes, and its first line speaks of {position}")
    return packages
