"""A web server in a thread whose pages are a function: for programs that ask over real HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

Page = tuple[int, bytes]
"""A status and a body."""
Pages = Callable[[str, Mapping[str, str]], Page]
"""Given the path and the headers of a request."""


@contextmanager
def http_pages(pages: Pages, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port of this machine at which the pages are."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body = pages(self.path, dict(self.headers.items()))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()
