"""One worker process of the rewards, as its parent sees it; `actors/reward_worker.py` is the other side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from actors.reward_worker import LENGTH, Sample
from forge.errors import RewardError

START_DEADLINE_S = 120.0
"""How long a process may take to start and to import one reward function, seconds."""
_REAP_DEADLINE_S = 5.0


class RewardProcess:
    """Runs one function at a time. Starts when first asked, anew after a time-out, a crash, a cancelled call.

    Processes of our own rather than a pool of multiprocessing's: the workers of that import the parent's main
    module, and its locks stay in /dev/shm when a whole run is killed.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths` of the functions that it imports when it starts, module:function each."""
        self._paths = list(paths)
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        self._closed = False

    async def start(self) -> None:
        """Starts the process and has it import its functions, so that no call pays for that.

        RewardError when it cannot, or takes longer than `START_DEADLINE_S` over one of them.
        """
        self._refuse_if_closed()
        if self._process is not None:
            return
        await self._reap()
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            try:
                self._refuse_if_closed()
            except RewardError:
                self._writer.close()
                raise
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from actors.reward_worker import serve; serve({theirs.fileno()}, {os.getpid()})"
            )
            # On this thread: the kernel ends the child with the thread that started it.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        for path in self._paths:
            try:
                await self._ask(path, [], START_DEADLINE_S)
            except TimeoutError as error:
                raise RewardError(
                    f"{path} was not imported within {START_DEADLINE_S:g} s of its worker's start"
                ) from error

    async def call(self, path: str, samples: list[Sample], timeout_s: float) -> list[float]:
        """Values of the function at `path`, one a sample.

        TimeoutError after `timeout_s`; RewardError with the user's traceback when the function raised, or
        with the exit code when it took its process down.
        """
        await self.start()
        return await self._ask(path, samples, timeout_s)

    async def _ask(self, path: str, samples: list[Sample], timeout_s: float) -> list[float]:
        try:
            request = pickle.dumps((path, samples))
        except Exception as error:
            raise RewardError(f"the samples for {path} cannot go to another process: {error}") from error
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(LENGTH.pack(len(request)) + request)
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                answer = json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self._kill()
            status = await self._reap()
            if self._closed:
                raise RewardError(f"the rewards were closed while {path} ran") from error
            prompt = f"\n  prompt {samples[0].prompt[:200]!r}" if samples else ""
            raise RewardError(f"{path} ended its worker process ({status}){prompt}") from error
        except BaseException:
            # The answer may still come; the next caller would take it for its own.
            self._kill()
            raise
        if "error" in answer:
            raise RewardError(answer["error"])
        return [float(value) for value in answer["values"]]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RewardError("the rewards are closed; score before shutdown")

    async def close(self) -> None:
        """Ends the process; a call in progress raises RewardError. May be called twice."""
        self._closed = True
        self._kill()
        await self._reap()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._writer.close()
            # Its whole group: a reward may have started programs of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._killed.append(process)

    async def _reap(self) -> str:
        """Waits for killed processes to be gone; says how the last one ended."""
        status = "not running"
        while self._killed:
            status = _describe_exit(await asyncio.to_thread(self._killed.pop().wait, _REAP_DEADLINE_S))
        return status


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"
