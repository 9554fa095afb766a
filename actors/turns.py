"""Taking turns: trainer and generators on the same devices, for who has one GPU.

Nobody who calls `Generators.generate`, `TrainerMesh.step` or `WeightSync.publish` notices; the turns are taken inside.
A training turn (a step, a saved or loaded state) has the devices alone. All other time is the generators'.

    TrainerMesh.step ── training ──► waits for a flip that is under way, and for the turns asked for before
                                     engines: requests are interrupted and keep their tokens, new ones wait
                                     engines sleep: weights to host memory, no KV cache    (GPUs)
                                     parameters and optimizer to the device, step, back    (GPUs)
                                     engines wake; requests go on from their tokens
    WeightSync.publish ────────────► a copy in host memory; the weight loop stages it while generators decode
    Replica.flip ───── serving ────► waits for a training turn that runs, or that was asked for before

A turn is never held from one call to the next, so none can be forgotten: that is why the new weights arrive just after
the generators have woken, as they do without turns, and not before it. Who waits for whom has no circle: a step
waits for flips, which wait for requests at most (`weightsync.kv` drain), which wait for nobody once they run; a flip
waits for steps, which by then wait for nobody. Turns are given in the order in which they are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from forge.errors import DeadlineExceeded
from forge.mesh import within

T = TypeVar("T")
_PARTING_S = 10.0
"""How long a turn that is cancelled waits for the engines to have woken, seconds; whoever cancels ends the run."""


class Clock:
    """Deadlines of what cannot go on during a training turn: they stand still then."""

    def __init__(self) -> None:
        self._stopped = False
        self._left: dict[asyncio.Timeout, float] = {}

    async def within(self, seconds: float, what: str, awaitable: Awaitable[T]) -> T:
        """`forge.mesh.within`, of seconds during which this clock runs."""
        try:
            async with asyncio.timeout(None if self._stopped else seconds) as scope:
                self._left[scope] = seconds
                try:
                    return await within(math.inf, what, awaitable)
                finally:
                    del self._left[scope]
        except TimeoutError:
            if not scope.expired():
                raise
        raise DeadlineExceeded(f"waited {seconds:g} s for {what}, in vain")

    def stop(self) -> None:
        """From now on no deadline comes nearer."""
        if not self._stopped:
            self._stopped, now = True, asyncio.get_running_loop().time()
            for scope in self._unexpired():
                self._left[scope] = (scope.when() or now) - now
                scope.reschedule(None)

    def go_on(self) -> None:
        """The opposite of `stop`; both may be called again."""
        if self._stopped:
            self._stopped, now = False, asyncio.get_running_loop().time()
            for scope in self._unexpired():
                scope.reschedule(now + self._left[scope])

    def _unexpired(self) -> list[asyncio.Timeout]:
        return [scope for scope in self._left if not scope.expired()]


class Sleeper(Protocol):
    """Who leaves the devices for a training turn. Both calls have deadlines of their own."""

    name: str

    async def sleep(self) -> None:
        """Nothing of it is computed when this returns, until `wake`."""

    async def wake(self) -> None:
        """It goes on. Works after a `sleep` that failed or was given up, too."""


@dataclass(eq=False)
class _Turn:
    what: str
    alone: bool
    admitted: asyncio.Future[None]


class Turns:
    """Who may use the devices: generators together, or the trainer alone. Belongs to one event loop.

    wait_s: how long somebody may wait for his turn, seconds; more than the longest turn of another.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._sleepers: list[Sleeper] = []
        self._waiting: deque[_Turn] = deque()
        self._held: list[_Turn] = []
        self.clock = Clock()
        """Stands still during training turns."""

    def add(self, sleeper: Sleeper) -> None:
        """From the next training turn on `sleeper` sleeps through them."""
        self._sleepers.append(sleeper)

    @contextlib.asynccontextmanager
    async def training(self, what: str) -> AsyncIterator[float]:
        """Inside, every sleeper sleeps and nobody else has a turn; yields the seconds that it took to get there.

        Afterwards all are awake, whatever happened. Raises DeadlineExceeded, naming `what` and who has the turn, and
        what a sleeper raises.
        """
        begin = time.perf_counter()
        async with self._turn(what, alone=True):
            self.clock.stop()
            try:
                await _all([sleeper.sleep() for sleeper in self._sleepers])
                yield time.perf_counter() - begin
            except BaseException as error:
                await self._wake_after(error)
                raise
            else:
                await _all([sleeper.wake() for sleeper in self._sleepers])
            finally:
                self.clock.go_on()

    @contextlib.asynccontextmanager
    async def serving(self, what: str) -> AsyncIterator[None]:
        """Inside, there is no training turn; for what must not be interrupted by one. Others serve at the same time.

        Raises DeadlineExceeded, naming `what` and who has the turn.
        """
        async with self._turn(what, alone=False):
            yield

    async def _wake_after(self, error: BaseException) -> None:
        """Wakes all; what goes wrong with that is told beside `error`, which is why it has to be now."""
        waking = _all([sleeper.wake() for sleeper in self._sleepers])
        try:
            if isinstance(error, asyncio.CancelledError):
                waking = within(_PARTING_S, "the engines to wake", waking)
            await waking
        except Exception as second:
            error.add_note(f"and then the generators did not all wake: {second}")

    @contextlib.asynccontextmanager
    async def _turn(self, what: str, *, alone: bool) -> AsyncIterator[None]:
        turn = _Turn(what, alone, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self._admit()
        try:
            try:
                await within(self._wait_s, f"the turn of {what}", turn.admitted)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{error}: {self._holders()}") from error
            yield
        finally:
            (self._held if turn in self._held else self._waiting).remove(turn)
            self._admit()

    def _admit(self) -> None:
        """Gives turns to those who wait, in their order, as far as they go together."""
        while self._waiting and not any(turn.alone for turn in self._held):
            if self._waiting[0].alone and self._held:
                return
            turn = self._waiting.popleft()
            self._held.append(turn)
            if not turn.admitted.done():  # a cancelled one goes at once
                turn.admitted.set_result(None)

    def _holders(self) -> str:
        return f"it is that of {' and '.join(turn.what for turn in self._held) or 'nobody'}"


async def _all(calls: list[Awaitable[None]]) -> None:
    """Waits for all of `calls`; raises what the first of them has raised."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
