"""How a node introduces itself to its server: before it starts anything, so that a refusal comes at once."""

from __future__ import annotations

import logging

from polar import __version__
from polar.client import AsyncClient
from polar.errors import Conflict, NotFound
from polar.models.views import Join, Joined
from polar.node.reaching import until_reached

log = logging.getLogger(__name__)


async def join(client: AsyncClient, name: str) -> Joined:
    """The server's welcome, waited for while it cannot be reached; PolarError if it refuses."""
    try:
        joined = await until_reached("join", client.join, name, Join(version=__version__))
    except NotFound:
        raise Conflict(
            f"the server at {client.server} is of a version that no node of version {__version__} can join",
            hint="install the same version of Polar on both",
        ) from None
    if joined.version != __version__:
        log.warning("the server is of version %s, this node of version %s", joined.version, __version__)
    return joined
