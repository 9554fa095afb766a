"""The side door of a vLLM worker: what need not wait for the end of a decode step comes in here.

A call through the engine (`collective_rpc`) runs in the engine's own thread, between two decode steps: it waits for the
end of one, and the next one waits for it. Staging a version needs nothing of that thread, so actor and workers have a
connection of their own:

    actor (`Doors`)                                     each worker (`WorkerDoor`)
    {number, request} ─── length, JSON ──► thread "side-door":  reads; whatever is under way is overtaken
                                           thread "staging":    does one request after the other
    {number, result, error} ◄───────────────────────────────────  and answers once, when it is done or has failed

The actor waits for the answer, the worker's threads for a request. A socket has an abstract name, which lies in no
folder and ends with its process; it takes one connection, of the same user, and then closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import queue
import secrets
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from forge.errors import WeightSyncError

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
"""Of the other side, as the kernel knows it: pid, user, group."""


class WorkerDoor:
    """A worker's end; `address` is what the actor's end is given.

    `do(request)` runs in a thread of this door; what it returns, in text and numbers, is the answer, what it raises as
    well. A request overtakes the older ones, since nobody waits for those any more: `overtake(request)` is called as
    soon as it comes, while an older one may be under way, and of those that have not begun none is done.
    """

    def __init__(self, do: Callable[[Any], Any], overtake: Callable[[Any], None]) -> None:
        self._do, self._overtake = do, overtake
        self._requests: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._newest = -1
        self.address = f"meshforge-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{self.address}")
        listener.listen(1)
        threading.Thread(target=self._listen, args=(listener,), name="side-door", daemon=True).start()

    def _listen(self, listener: socket.socket) -> None:
        with listener:
            link = _accept(listener)
        threading.Thread(target=self._work, args=(link,), name="staging", daemon=True).start()
        with link, contextlib.suppress(EOFError, ConnectionError):  # the actor has ended
            while True:
                message = _read(link)
                self._newest = message["number"]
                self._overtake(message["request"])
                self._requests.put((message["number"], message["request"]))
        self._requests.put(None)

    def _work(self, link: socket.socket) -> None:
        while (job := self._requests.get()) is not None:
            number, request = job
            answer: dict[str, Any] = {"number": number, "result": None, "error": ""}
            if number == self._newest:
                try:
                    answer["result"] = self._do(request)
                except BaseException:
                    answer["error"] = traceback.format_exc()
            else:
                answer["error"] = "overtaken by a newer request before it began"
            with contextlib.suppress(OSError):  # nobody is there any more
                link.sendall(_frame(answer))


class Doors:
    """The actor's end: a connection to each worker of its engine, which ends with that. All methods belong to one event
    loop.
    """

    def __init__(self, wires: Sequence[_Wire]) -> None:
        self._wires = wires
        self._numbers = itertools.count()

    @classmethod
    async def open(cls, addresses: Sequence[str]) -> Doors:
        """Connects to the workers whose doors have these addresses."""
        loop = asyncio.get_running_loop()
        made = [await loop.create_unix_connection(_Wire, f"\0{address}") for address in addresses]
        return cls([wire for _, wire in made])

    async def ask(self, request: Any) -> list[Any]:
        """Has every worker do `request`, text and numbers; returns what they return, in their order.

        Who stops waiting gives the request up, and the next one overtakes it. Raises WeightSyncError with the traceback
        of the first worker that fails, ConnectionError where one is gone.
        """
        number = next(self._numbers)
        answers = [wire.ask(number, request) for wire in self._wires]
        try:
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()


class _Wire(asyncio.Protocol):
    """One connection of the actor's end."""

    def __init__(self) -> None:
        self._link: Any = None
        self._received = bytearray()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._lost = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link = transport

    def ask(self, number: int, request: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        if self._lost:
            answer.set_exception(ConnectionResetError(self._lost))
            return answer
        self._waiting[number] = answer
        answer.add_done_callback(lambda _: self._waiting.pop(number))
        self._link.write(_frame({"number": number, "request": request}))
        return answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = json.loads(self._received[_LENGTH.size : end])
            del self._received[:end]
            answer = self._waiting.get(message["number"])
            if answer is None or answer.done():
                continue  # nobody waits for it any more
            if message["error"]:
                answer.set_exception(WeightSyncError(message["error"]))
            else:
                answer.set_result(message["result"])

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = "a worker of the engine has closed its side door: its process has ended"
        for answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(ConnectionResetError(self._lost))


def _accept(listener: socket.socket) -> socket.socket:
    """The first connection of this process's own user."""
    while True:
        link, _ = listener.accept()
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] == os.geteuid():
            return link
        link.close()


def _frame(message: Any) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def _read(link: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    return json.loads(_exactly(link, length))


def _exactly(link: socket.socket, count: int) -> bytearray:
    received = bytearray(count)
    missing = memoryview(received)
    while missing:
        got = link.recv_into(missing)
        if not got:
            raise EOFError
        missing = missing[got:]
    return received
