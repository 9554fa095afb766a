"""The controller's coroutine under signal handling, from its start to an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import NoReturn

from forge.failure import print_failure

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping(asyncio.Event):
    """Set by the first Ctrl-C (or SIGTERM): finish the step, write the checkpoint, return."""

    def __init__(self) -> None:
        super().__init__()
        self.immediate = False
        """True while the first Ctrl-C cancels the run at once."""

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, the first Ctrl-C cancels the run: for start-up, where there is nothing yet worth saving."""
        self.immediate = True
        try:
            yield
        finally:
            self.immediate = False


class Controller:
    """Drives one coroutine to its end.

    The first signal sets `stopping`, the second cancels the coroutine, the third ends the process on the
    spot; so does any signal once the coroutine has ended.
    """

    def __init__(self, main: Callable[[Stopping], Awaitable[object]]) -> None:
        self._main = main
        self._loop = asyncio.new_event_loop()
        self._stopping = Stopping()
        self._presses = 0
        self._last_press_s = float("-inf")
        self._signal = 0

    def drive(self) -> int:
        """The exit code of the coroutine; an error has been printed."""
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._call_main(), name="main")
        # These run even while synchronous code holds the loop; the loop's own handlers would not.
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        code = self._exit_code()
        self._cancel_leftovers()
        return code

    async def _call_main(self) -> None:
        await self._main(self._stopping)

    def _exit_code(self) -> int:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            if not self._signal:
                print("the run was cancelled", file=sys.stderr, flush=True)
                return 1
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:
            return print_failure(error)
        return 128 + self._signal if self._signal else 0

    def _on_signal(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        # A terminal and torchrun's agent may both deliver one press.
        if now - self._last_press_s < 0.3:
            return
        self._last_press_s = now
        self._presses += 1
        self._signal = self._signal or number
        if self._presses >= 3 or self._task.done():
            exit_at_once(128 + self._signal)
        self._loop.call_soon_threadsafe(self._on_press, self._presses)

    def _on_press(self, presses: int) -> None:
        self._stopping.set()
        if presses > 1 or self._stopping.immediate:
            print("\nstopping now", file=sys.stderr, flush=True)
            self._task.cancel()
        else:
            print("\nstopping after this step; press Ctrl-C again to stop now", file=sys.stderr, flush=True)

    def _cancel_leftovers(self, timeout_s: float = 2.0) -> None:
        """Cancel what the coroutine left running. Executor threads are not waited for: they may hang."""
        leftovers = asyncio.all_tasks(self._loop)
        for task in leftovers:
            task.cancel()
        if leftovers:
            self._loop.run_until_complete(asyncio.wait(leftovers, timeout=timeout_s))


def exit_on_signals() -> None:
    """Until a Controller takes over, a signal ends the process at once, and with it Monarch's children."""

    def stop(number: int, _frame: object) -> None:
        print("\nstopped", file=sys.stderr, flush=True)
        exit_at_once(128 + number)

    for number in _SIGNALS:
        signal.signal(number, stop)


def exit_at_once(code: int) -> NoReturn:
    """Leave without interpreter finalisation, in which Monarch's runtime now and then aborts."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
