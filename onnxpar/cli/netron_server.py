"""Serves Netron's pages, and the files that they show, but no others.

Netron's own server sends every file below the folder of the graph, answers for every name of a
host, and prints a traceback for each malformed request.
"""

import shutil
import socket
from collections.abc import Mapping
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, BinaryIO
from urllib.parse import quote, unquote, urlsplit

import netron

from onnxpar_format.host_header import problem_of_host
from onnxpar_format.regular_file import open_regular
from onnxpar_format.texts import message_text

_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}
_DATA = "/data/"


class NetronServer(ThreadingTCPServer):
    """A server of one graph; it has begun to listen.

    Args:
        graph: The name of the graph among the files.
        files: Where each file is.
        host: The address on which to listen.
        port: The port; 0 takes a free one.

    Attributes:
        url: The address of the page.

    Raises:
        OSError: The port cannot be used.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, graph: str, files: Mapping[str, Path], host: str, port: int) -> None:
        """Begins to listen."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.named = host
        self.bound, free = self.socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{free}"
        folder = Path(netron.__file__).parent
        pages = [path for path in folder.iterdir() if path.suffix in _TYPES]
        self.files = {f"/{path.name}": path for path in pages}
        self.files |= {_DATA + name: path for name, path in files.items()}
        # The page reads the first element with a name.
        shown = {"type": "Python", "file": _DATA + quote(graph), "identifier": graph}
        metas = "".join(f'<meta name="{k}" content="{escape(v)}">' for k, v in shown.items())
        page = (folder / "index.html").read_text(encoding="utf-8")
        self.page = page.replace("<head>", f"<head>{metas}", 1).encode()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a client that goes away is no error, and nobody may read stderr."""


class _Handler(BaseHTTPRequestHandler):
    server: NetronServer
    raw_requestline: bytes
    # Answers to requests without a version that is known have a status, too.
    default_request_version = "HTTP/1.0"
    timeout = 60

    def parse_request(self) -> bool:
        """Reads the header of a request, and answers if it is malformed."""
        if self.raw_requestline.strip():
            return super().parse_request()
        self.requestline = self.request_version = self.command = ""
        self.send_error(HTTPStatus.BAD_REQUEST, "Empty request line")
        return False

    def do_HEAD(self) -> None:
        """Answers without the file."""
        self.do_GET()

    def do_GET(self) -> None:
        """Sends a file."""
        problem = problem_of_host(self.server.named, self.server.bound, self.headers.get("Host"))
        if problem is not None:
            self.send_error(HTTPStatus.FORBIDDEN, explain=message_text(problem))
            return
        try:
            # Names are looked up, and never lead to other files.
            name = unquote(urlsplit(self.path).path)
            stream, size, kind = self._found(name)
        except (ValueError, KeyError, OSError):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with stream:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if self.command != "HEAD":
                shutil.copyfileobj(stream, self.wfile)

    def _found(self, name: str) -> tuple[BinaryIO, int, str]:
        """Returns a file, its size in bytes, and its type."""
        if name in ("/", "/index.html"):
            return BytesIO(self.server.page), len(self.server.page), _TYPES[".html"]
        path = self.server.files[name]
        stream = open_regular(path)
        own = not name.startswith(_DATA)
        kind = _TYPES[path.suffix] if own else "application/octet-stream"
        return stream, stream.seek(0, 2) - stream.seek(0), kind

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""
