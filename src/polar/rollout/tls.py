"""How the server's port is protected: HTTPS with its own certificate, and plain HTTP on this machine only."""

from __future__ import annotations

import ipaddress
import ssl
from typing import Any

from polar.config.settings import ServerSettings, TlsSettings
from polar.errors import InvalidInput


def is_for_this_machine(settings: ServerSettings) -> bool:
    """Whether the server listens for nobody else."""
    return _is_loopback(settings.host)


def refuse_plain_http(settings: ServerSettings) -> None:
    """InvalidInput if tokens would travel unencrypted to other machines and nobody said that they may."""
    if settings.tls is None and not settings.insecure and not is_for_this_machine(settings):
        raise InvalidInput(
            f"the server would listen on {settings.host} without TLS: others could read tokens on the way",
            hint="give --tls-cert and --tls-key, or say --insecure behind a proxy or in your own network",
        )


def listening_options(tls: TlsSettings | None) -> dict[str, Any]:
    """What uvicorn is told; InvalidInput if the certificate cannot be used."""
    if tls is None:
        return {}
    options = {
        "ssl_certfile": str(tls.cert),
        "ssl_keyfile": str(tls.key),
        "ssl_ca_certs": str(tls.client_ca) if tls.client_ca else None,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if tls.client_ca else ssl.CERT_NONE,
    }
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key, lambda: "")
        if tls.client_ca:
            context.load_verify_locations(tls.client_ca)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(
            f"server.tls: the certificate {tls.cert} with the key {tls.key} cannot be used: {reason}",
            hint="both are files in PEM, the key without a password",
        ) from None
    return options


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
