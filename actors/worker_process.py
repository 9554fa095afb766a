"""One worker process as its parent sees it: started, asked, killed with all that it started.

Processes of our own rather than a pool of multiprocessing's: the workers of that import the parent's main
module, and its locks stay in /dev/shm when a whole run is killed. `actors/worker_loop.py` is the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

from actors.worker_loop import LENGTH

START_DEADLINE_S = 120.0
"""How long a process may take to start and to import what one request names, seconds."""
_REAP_DEADLINE_S = 5.0
_BY_SIGNAL = "killed by "


class WorkerGone(Exception):
    """The process ended while it was asked, or has been closed; owners turn this into an error of their own."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status
        """How it ended, in words."""
        self.killed = status.startswith(_BY_SIGNAL)
        """Whether a signal ended it."""


class WorkerProcess:
    """Answers one request at a time; may be started anew after a time-out, a crash, a cancelled call.

    Belongs to one event loop: the kernel ends the process with the thread that started it.
    """

    def __init__(self, module: str) -> None:
        """`module` whose `serve(fd, parent)` the process runs."""
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        self.closed = False
        """Whether `close` was called; nothing starts any more then."""

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended since."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Starts the process. WorkerGone once closed, OSError where the system has no room for one."""
        self.kill()
        await self.reap()
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from {self._module} import serve; serve({theirs.fileno()}, {os.getpid()})"
            )
            try:
                if self.closed:
                    raise WorkerGone("closed")
                # On this thread: the kernel ends the child with the thread that started it.
                self._process = subprocess.Popen(  # noqa: ASYNC220
                    [sys.executable, "-c", code],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                self._writer.close()
                raise

    async def ask(self, request: bytes, timeout_s: float) -> bytes:
        """The answer. TimeoutError after `timeout_s`, WorkerGone when the process ends over it.

        Whatever goes wrong, cancelling included, the process is killed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(LENGTH.pack(len(request)) + request)
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.kill()
            raise WorkerGone(await self.reap()) from error
        except BaseException:
            # The answer may still come; the next caller would take it for its own.
            self.kill()
            raise

    async def close(self) -> None:
        """Ends the process for good; a request in progress raises WorkerGone. May be called twice."""
        self.closed = True
        self.kill()
        await self.reap()

    def kill(self) -> None:
        """Kills the process, if there is one; `reap` waits for its end."""
        process, self._process = self._process, None
        if process is not None:
            self._writer.close()
            # Its whole group: users' code may have started programs of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._killed.append(process)

    async def reap(self) -> str:
        """Waits for killed processes to be gone; says how the last one ended."""
        status = "not running"
        while self._killed:
            status = _describe_exit(await asyncio.to_thread(self._killed.pop().wait, _REAP_DEADLINE_S))
        return status


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
    return f"{_BY_SIGNAL}{signal.Signals(-code).name}{hint}"
