"""How the members of a group find each other: keys and values in the memory of trainer rank 0, behind a socket.

Not in a TCPStore: its client waits in C++, beyond any deadline, for a server that has been stopped. Nothing ends such
a thread, and when the server dies at that moment it aborts the interpreter's exit.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# How often a waiting member looks at its clock.
_LOOK_S = 0.1
# What the board is given beyond the deadline, so that it can still say who is missing.
_GRACE_S = 0.5


class Clock:
    """A transfer's deadline, and whether somebody has called it off."""

    def __init__(self, deadline_s: float) -> None:
        self._end = time.monotonic() + deadline_s
        self.called_off = False

    @property
    def over(self) -> bool:
        return self.called_off or time.monotonic() >= self._end

    def left(self) -> float:
        """Seconds that are left; raises TimeoutError when none are."""
        if self.over:
            raise TimeoutError
        return max(self._end - time.monotonic(), 0.001)


class Board:
    """The server. A request is a line of JSON, and so is its answer, with those of the keys that there are."""

    def __init__(self, host: str) -> None:
        values: dict[str, str] = {}
        changed = threading.Condition()

        class Handler(socketserver.StreamRequestHandler):
            timeout = 10.0

            def handle(self) -> None:
                request = json.loads(self.rfile.readline())
                with changed:
                    values.update(request["put"])
                    changed.notify_all()
                    changed.wait_for(lambda: all(key in values for key in request["get"]), request["wait_s"])
                    found = {key: values[key] for key in request["get"] if key in values}
                self.wfile.write(json.dumps(found).encode() + b"\n")

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that died while it asked; the trainer's log is not the place for it."""

        self._values, self._changed = values, changed
        self._server = Server((host, 0), Handler)
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="weights board", daemon=True).start()

    def forget(self, prefix: str) -> None:
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Lost(Exception):
    """Nothing more will come from `members`; `cause` is empty where they just do not answer."""

    def __init__(self, members: Sequence[int], cause: str = "") -> None:
        super().__init__(cause)
        self.members = members
        self.cause = cause


class BoardClient:
    """Asks trainer rank 0's board about the keys below `prefix`."""

    def __init__(self, address: tuple[str, int], prefix: str, clock: Clock) -> None:
        self._address = address
        self._prefix = prefix
        self._clock = clock
        self.own_ip = ""

    def ask(self, put: Mapping[str, str] | None = None, get: Sequence[str] = (), wait_s: float = 0.0) -> dict[str, str]:
        """Puts, and returns what there is of `get`, where it waits for up to `wait_s` until all is there."""
        request = {
            "wait_s": wait_s,
            "put": {self._prefix + key: value for key, value in (put or {}).items()},
            "get": [self._prefix + key for key in get],
        }
        try:
            with socket.create_connection(self._address, timeout=self._clock.left()) as connection:
                # The address by which the other members reach this process too.
                self.own_ip = connection.getsockname()[0]
                connection.sendall(json.dumps(request).encode() + b"\n")
                connection.settimeout(self._clock.left() + _GRACE_S)
                with connection.makefile("rb") as answer:
                    found = json.loads(answer.readline() or b"null")
        except TimeoutError:
            raise Lost([0]) from None
        except OSError as error:
            raise Lost([0], str(error)) from None
        if found is None:
            raise Lost([0], "it hung up")
        return {key.removeprefix(self._prefix): value for key, value in found.items()}

    def wait_for(self, keys: Mapping[str, int]) -> dict[str, str]:
        """Asks until all are there. `keys` says which member each comes from."""
        found: dict[str, str] = {}
        while not self._clock.over:
            found = self.ask(get=list(keys), wait_s=min(_LOOK_S, self._clock.left()))
            if len(found) == len(keys):
                return found
        raise Lost([member for key, member in keys.items() if key not in found])


class GlooStore(dist.Store):
    """The board as gloo wants it, whose members exchange their addresses under a key for each: ".../<member>"."""

    def __init__(self, client: BoardClient, prefix: str) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._client.ask(put={self._prefix + key: value.hex()})

    def get(self, key: str) -> bytes:
        (value,) = self._await([key]).values()
        return bytes.fromhex(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await(keys)

    def _await(self, keys: Sequence[str]) -> dict[str, str]:
        return self._client.wait_for({self._prefix + key: int(key.rpartition("/")[2]) for key in keys})
