"""The Python client of the control plane, sync and async: submit tasks, wait, iterate results."""

from polar.client.clients import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
