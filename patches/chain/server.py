"""A web server for a folder with a chain, for :class:`~gckernels.patches.Http`."""

from __future__ import annotations

import hmac
import ssl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .stores import Folder, checked_name

_PART = 2**20


def server_of(
    folder: Folder,
    host: str,
    port: int,
    *,
    token: str | None = None,
    certificate: str | None = None,
    certificate_key: str | None = None,
    writable: bool = False,
) -> ThreadingHTTPServer:
    """A server that is bound and not yet running (``serve_forever``).

    Args:
        folder: the objects.
        host: the address to listen at.
        port: the port; 0 for any free one, which is ``server.server_address[1]``.
        token: if given, requests without it are refused.
        certificate: a file with the server's certificates; with it the server speaks TLS.
        certificate_key: a file with the private key, if the former does not have it.
        writable: whether objects may be written and removed, by a publisher on another machine.

    Raises:
        OSError: the address cannot be had, or a file cannot be read.
    """
    server = ThreadingHTTPServer((host, port), type("Handler", (_Handler,), {}))
    handler: type[_Handler] = server.RequestHandlerClass  # type: ignore[assignment]
    handler.folder, handler.token, handler.writable = folder, token, writable
    if certificate is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate_key)
        except BaseException:
            server.server_close()
            raise
        # the handshake is left to the thread of the connection, so that no client keeps others waiting
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection, in its own thread."""

    folder: Folder
    token: str | None
    writable: bool
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Send an object, or the names of all."""
        name = self._name()
        if name is None:
            return
        if not name:
            self._answer(200, "\n".join(self.folder.names()).encode())
            return
        try:
            with open(self.folder.path / name, "rb") as file:  # an object is replaced, never changed
                self.send_response(200)
                self.send_header("Content-Length", str(file.seek(0, 2)))
                self.end_headers()
                file.seek(0)
                while part := file.read(_PART):
                    self.wfile.write(part)
        except FileNotFoundError:
            self._answer(404)

    def do_PUT(self) -> None:
        """Write an object; with ``If-None-Match: *`` only if there is none."""
        name = self._name(writes=True)
        if name is None:
            return
        length = self.headers.get("Content-Length", "")
        data = self.rfile.read(int(length)) if length.isdecimal() else b""
        if not name or not length.isdecimal() or len(data) != int(length):
            self.close_connection = True
            self._answer(400)
        elif self.headers.get("If-None-Match") == "*":
            self._answer(201 if self.folder.put_if_absent(name, data) else 412)
        else:
            self.folder.put(name, data)
            self._answer(201)

    def do_DELETE(self) -> None:
        """Remove an object."""
        name = self._name(writes=True)
        if name:
            self.folder.delete(name)
            self._answer(204)
        elif name is not None:
            self._answer(400)

    def _name(self, writes: bool = False) -> str | None:
        """The name that is asked for; ``None`` if the request has been refused."""
        name, code = self.path.removeprefix("/"), 0
        given = self.headers.get("Authorization", "")
        if self.token is not None and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            code = 401
        elif writes and not self.writable:
            code = 405
        else:
            try:
                return name and checked_name(name)
            except ValueError:
                code = 404
        self.close_connection = True  # the body has not been read
        self._answer(code)
        return None

    def _answer(self, code: int, data: bytes = b"") -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if code != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: followers ask every few seconds."""
