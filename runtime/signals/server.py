"""The Prometheus endpoint: ``GET /metrics`` over HTTP, on a thread, from running sums."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Self

from probes.errors import RunError
from runtime.signals.prometheus import CONTENT_TYPE

CLIENT_SECONDS = 5.0
"""How long a client may take with its request before its connection is closed."""


class MetricsServer:
    """Serves ``text()`` at ``/metrics`` while the ``with`` block lasts; ``url`` says where (port 0: a free one).

    Raises ``RunError`` at once where it cannot listen there. ``text`` is called on other threads.
    """

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _Server(family, (str(address[0]), int(address[1])), text)
        except (OSError, OverflowError) as error:
            raise RunError(
                f"metrics cannot be served at {host}:{port}: {getattr(error, 'strerror', None) or error}",
                hint="give a port that is free with --metrics-port, 0 for any, and an address of this machine "
                "with --metrics-host",
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="metrics")

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if self._server.address_family == socket.AF_INET6 else str(host)
        return f"http://{name}:{port}/metrics"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that hangs does not hold up the end

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int], text: Callable[[], str]) -> None:
        self.address_family = family
        self.text = text
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service who we are, which can take seconds.
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_SECONDS
    server_version = "caee"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND, "metrics are at /metrics")
            return
        text = self.server.text().encode(errors="replace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if body:
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Standard error belongs to the command."""
