"""What runs in a worker process of ours: it takes requests from a socket, one after the other, and answers each.

Users' code runs there: it may hang, crash, leak, or hold the interpreter for minutes, and hurts nobody else.
Workers start often, so this file imports nothing heavy. `actors/worker_process.py` is the other side.

    message    its length, 8 bytes, then as many bytes
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO, cast

LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1


def serve(fd: int, parent: int, answer: Callable[[bytes], bytes]) -> None:
    """Answers requests on the socket `fd` until its other end is closed or the process `parent` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A program that users' code starts must not keep the socket open.
    os.set_inheritable(fd, False)
    _end_with(parent)
    with socket.socket(fileno=fd) as connection, connection.makefile("rwb") as stream:
        while (request := _read_message(cast(BinaryIO, stream))) is not None:
            message = answer(request)
            stream.write(LENGTH.pack(len(message)) + message)
            stream.flush()


def users_traceback(error: BaseException | None, *, own_frames: int = 1) -> str:
    """Of `error`, from the user's code inwards: the outermost frames, `own_frames` of them, are left out."""
    if error is None:
        return ""
    inner = error.__traceback__
    for _ in range(own_frames):
        inner = inner.tb_next if inner else None
    return "".join(traceback.format_exception(type(error), error, inner)).rstrip()


def _read_message(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def _end_with(parent: int) -> None:
    """Has the kernel kill this process once `parent` is dead, even while users' code holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
