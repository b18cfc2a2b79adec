"""Which servers a client believes: those the machine trusts, those of a named authority, the local one."""

from __future__ import annotations

import ssl
from pathlib import Path

from polar.config.settings import environment_ca, environment_client_cert
from polar.errors import InvalidInput

_END = "-----END CERTIFICATE-----"

Authority = str | Path | ssl.SSLContext | None
"""A file of certificates in PEM, a context made by `pinned`, or nothing in particular."""


def trusting(ca: Authority, server: str) -> ssl.SSLContext | bool:
    """How the certificate of a server is checked, and which one this client shows."""
    if not server.startswith("https://"):
        return True
    if isinstance(ca, ssl.SSLContext):
        return ca
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
