"""Clocks of `apps.bench.agentic`: an event loop in which waiting takes no time, and how late a real one wakes up."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_LAG_EVERY_S = 0.02


class _Jumping(selectors.DefaultSelector):
    """Moves the clock to the next timer instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError(f"deadlock after {self.now:.1f} virtual seconds: nobody waits for a time")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Virtual seconds: what a run loses here it loses by who waits for whom, since computing takes no time.

    Work for threads runs at once, on this one.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Calls `func` now."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run(work: Coroutine[Any, Any, T], *, virtual: bool) -> T:
    """`asyncio.run`, in virtual time if asked to."""
    with asyncio.Runner(loop_factory=VirtualLoop if virtual else None) as runner:
        return runner.run(work)


class Lag:
    """How late the event loop resumes who has slept, in seconds: what computing costs those that wait."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._total_s = 0.0
        self._count = 0

    @property
    def mean_s(self) -> float:
        """Over all probes."""
        return self._total_s / max(1, self._count)

    async def watch(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            late = max(0.0, loop.time() - due)
            self.longest_s, self._total_s, self._count = (
                max(self.longest_s, late),
                self._total_s + late,
                self._count + 1,
            )
