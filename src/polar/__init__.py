"""Polar: train language agents with reinforcement learning through unmodified agent harnesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]

if TYPE_CHECKING:
    from polar.client import AsyncClient, Client


def __getattr__(name: str) -> Any:
    """Import the clients on first use, so that `import polar` stays light."""
    if name in ("AsyncClient", "Client"):
        from polar import client

        return getattr(client, name)
    raise AttributeError(f"module 'polar' has no attribute {name!r}")
