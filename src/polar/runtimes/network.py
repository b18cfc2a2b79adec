"""The network of sandboxes that have one of their own: the gateway, and what a task's allow list names."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from polar.runtimes.allow_list import AllowList, Destination
from polar.runtimes.base import SandboxSpec
from polar.runtimes.forward_proxy import proxied, proxy_environment
from polar.runtimes.forwarding import forwarded

GATEWAY_PORT = 47100
"""Where the gateway is found on the loopback of every sandbox; high, to be in no agent's way."""
PROXY_PORT = 47101
"""Where the proxy is found, in sandboxes that are allowed more than the gateway."""


class Network(BaseModel):
    """What a task asks to reach besides the gateway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow: tuple[Annotated[str, AfterValidator(lambda text: str(Destination.parse(text)))], ...] = Field(
        default=(), max_length=256
    )
    """`host:port` each; `*.domain:port` names all hosts below a domain."""

    @property
    def allowed(self) -> AllowList:
        return AllowList.parse(self.allow)

    @property
    def ports(self) -> tuple[int, ...]:
        """Where the node listens on the sandbox's loopback."""
        return (GATEWAY_PORT, PROXY_PORT) if self.allow else (GATEWAY_PORT,)

    @property
    def env(self) -> dict[str, str]:
        """What tells the sandbox's programs of the proxy."""
        return proxy_environment(self.allowed, PROXY_PORT) if self.allow else {}

    @asynccontextmanager
    async def attended(self, listeners: Sequence[socket.socket], spec: SandboxSpec) -> AsyncIterator[None]:
        """While inside, the node serves its listeners in the sandbox, given in the order of `ports`."""
        async with AsyncExitStack() as stack:
            for listener in listeners:
                stack.callback(listener.close)
            for gateway in listeners[:1]:
                await stack.enter_async_context(forwarded(gateway, spec.gateway_host, spec.gateway_port))
            for proxy in listeners[1:]:
                await stack.enter_async_context(proxied(proxy, self.allowed, spec.name))
            yield
