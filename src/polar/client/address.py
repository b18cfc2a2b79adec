"""Where the control plane is and what opens it, when the caller does not say."""

from __future__ import annotations

import json
from pathlib import Path

from polar.config.settings import Settings, environment_server, environment_token, load_settings
from polar.errors import PolarError


def server_address(given: str | None) -> str:
    """The control plane's URL: as given, from $POLAR_SERVER, or of the server started in this directory."""
    address = given or environment_server() or _local_server(load_settings())
    if not address.startswith(("http://", "https://")):
        raise PolarError(f"server {address!r} is not an address", hint="it begins with http:// or https://")
    return address.rstrip("/")


def server_token(given: str | None) -> str:
    """The bearer token: as given, from $POLAR_TOKEN, or of the data directory here."""
    token = given or environment_token()
    if token:
        return token.strip()
    settings = load_settings()
    if settings.server.token:
        return settings.server.token
    path = settings.data_dir / "token"
    try:
        return path.read_text().strip()
    except OSError:
        raise PolarError(
            f"no token for the server: POLAR_TOKEN is not set and {path} cannot be read",
            hint="run this where `polar serve` was started, or set POLAR_TOKEN to what its token file holds",
        ) from None


def server_certificate(address: str) -> Path | None:
    """The certificate of the server that was started in this directory, if that is the one at an address."""
    if not address.startswith("https://"):
        return None
    path = load_settings().data_dir / "server.json"
    try:
        local = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_it = isinstance(local, dict) and local.get("url") == address and local.get("certificate")
    return Path(local["certificate"]) if is_it else None


def _local_server(settings: Settings) -> str:
    path = settings.data_dir / "server.json"
    try:
        return str(json.loads(path.read_text())["url"])
    except FileNotFoundError:
        return f"http://{settings.server.host}:{settings.server.port}"
    except (OSError, ValueError, KeyError, TypeError):
        raise PolarError(f"{path} cannot be understood", hint="delete it, or set POLAR_SERVER") from None
