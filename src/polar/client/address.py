"""Where the control plane is, which token opens it and whose certificate is trusted, by default."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

from polar.config.settings import (
    Settings,
    environment_ca,
    environment_client_cert,
    environment_server,
    environment_token,
    load_settings,
)
from polar.errors import InvalidInput, PolarError

_END = "-----END CERTIFICATE-----"

Authority = str | Path | ssl.SSLContext | None
"""A file of certificates in PEM, a context made by `pinned`, or nothing in particular."""


def server_address(given: str | None) -> str:
    """The control plane's URL: as given, from $POLAR_SERVER, or of the server started in this directory."""
    address = given or environment_server() or _local_address(load_settings())
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


def trusted(ca: Authority, server: str) -> ssl.SSLContext | bool:
    """How the certificate of a server is checked, and which one this client shows."""
    if not server.startswith("https://"):
        return True
    if isinstance(ca, ssl.SSLContext):
        return ca
    if ca is None and (local := _local_certificate(server)) is not None:
        return pinned(local)
    path = Path(ca) if ca is not None else environment_ca()
    context = ssl.create_default_context()
    try:
        if path is not None:
            context.load_verify_locations(path)
        _show_own(context)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(
            f"a certificate cannot be used: {getattr(error, 'strerror', None) or error}",
            hint="POLAR_CA, POLAR_CLIENT_CERT and POLAR_CLIENT_KEY name files in PEM",
        ) from None
    return context


def pinned(cert: Path) -> ssl.SSLContext:
    """Trust exactly the server that has this certificate, whatever address it is reached at."""
    try:
        own, found, _ = cert.read_text().partition(_END)
        # Only the server's own: what it brings along to prove itself has signed others too.
        context = ssl.create_default_context(cadata=own + found)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
        _show_own(context)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise InvalidInput(f"the certificate {cert} cannot be used: {error}") from None
    return context


def _show_own(context: ssl.SSLContext) -> None:
    if (own := environment_client_cert()) is not None:
        context.load_cert_chain(*own)


def _local_address(settings: Settings) -> str:
    path = settings.data_dir / "server.json"
    try:
        return str(json.loads(path.read_text())["url"])
    except FileNotFoundError:
        return f"http://{settings.server.host}:{settings.server.port}"
    except (OSError, ValueError, KeyError, TypeError):
        raise PolarError(f"{path} cannot be understood", hint="delete it, or set POLAR_SERVER") from None


def _local_certificate(server: str) -> Path | None:
    """The certificate of the server that was started in this directory, if that is the one asked for."""
    try:
        local: Any = json.loads((load_settings().data_dir / "server.json").read_text())
    except (OSError, ValueError):
        return None
    is_local = isinstance(local, dict) and local.get("url") == server and local.get("certificate")
    return Path(local["certificate"]) if is_local else None
