"""The Python client of the control plane, sync and async: submit tasks, wait, iterate results."""

from polar.client.async_client import AsyncClient
from polar.client.client import Client

__all__ = ["AsyncClient", "Client"]
