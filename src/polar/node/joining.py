"""How a node introduces itself to its server: before it starts anything, so that a refusal comes at once."""

from __future__ import annotations

import logging

from polar import __version__
from polar.client import AsyncClient
from polar.config.settings import NodeSettings
from polar.errors import Conflict, InvalidInput, NotFound, retry_forever
from polar.models.views import Join, Joined
from polar.node.pools import places

log = logging.getLogger(__name__)


async def join(client: AsyncClient, settings: NodeSettings) -> Joined:
    """The server's welcome, waited for while it cannot be reached; PolarError if it refuses."""
    try:
        asked = Join(version=__version__, places=places(settings), runtimes=settings.runtimes)
        joined = await retry_forever("join", client.join, settings.name, asked)
    # An early server knows no joining, or not all that a node says of itself.
    except (NotFound, InvalidInput):
        raise Conflict(
            f"the server at {client.server} is of a version that no node of version {__version__} can join",
            hint="install the same version of Polar on both",
        ) from None
    if joined.version != __version__:
        log.warning("the server is of version %s, this node of version %s", joined.version, __version__)
    if joined.is_draining:
        log.warning("this node was drained and gets no sessions until `polar nodes resume %s`", settings.name)
    return joined
