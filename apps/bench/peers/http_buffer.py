"""A replay buffer behind HTTP and JSON, as Atropos has one, at its plainest: what it can be at best.

    python apps/bench/peers/http_buffer.py       # prints its port; ends with its input

POST /scored_data takes one group, GET /batch gives the oldest groups, a number of them. Nothing is checked, padded
or bounded. A frame-work, its validation and its middleware would add to each request; they are left out.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Holds the groups as they were parsed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.groups: deque[Any] = deque()


class Handler(BaseHTTPRequestHandler):
    """One connection; stays open between requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_POST(self) -> None:
        """A group."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Server)
        self.server.groups.append(json.loads(body))
        self._answer({"status": "received"})

    def do_GET(self) -> None:
        """`/batch/8`: the eight oldest groups."""
        assert isinstance(self.server, Server)
        count = int(self.path.rpartition("/")[2])
        self._answer([self.server.groups.popleft() for _ in range(count)])

    def _answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def main() -> None:
    """Serves until its input ends."""
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
