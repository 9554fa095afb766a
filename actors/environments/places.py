"""Places for a bounded number of episodes: first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Places:
    """Belongs to one event loop. A place that is given back goes to whoever has waited longest."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> int:
        """Places that nobody has."""
        return self._free

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        return sum(not turn.done() for turn in self._waiting)

    async def take(self, timeout_s: float) -> None:
        """Returns with a place, which `give_back` frees; TimeoutError after `timeout_s`."""
        if self._free:  # so nobody waits
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give_back()  # it came at the last moment
            else:
                with contextlib.suppress(ValueError):  # skipped already
                    self._waiting.remove(turn)
            raise

    def give_back(self) -> None:
        """Frees one place."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
