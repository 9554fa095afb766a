"""What the pool holds for one episode: an environment under time limits, on its own loop or in a process.

World
|- LocalWorld            an asynchronous environment, as tasks of this event loop
|- EnvironmentProcess    a synchronous one, in a worker process: actors/environments/process.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from actors.environments.base import (
    Action,
    Environment,
    Observation,
    Step,
    check_observation,
    check_step,
    load_environment,
)
from actors.worker_loop import users_traceback

T = TypeVar("T")
_GRACE_S = 5.0
"""How long an environment may go on after it was cancelled, seconds."""


class RaisedInside(Exception):
    """The environment's code raised, or returned what it must not; the text has the user's traceback."""


class ProcessEnded(Exception):
    """The environment's process ended over a call, or could not be started; the text says how."""


class ImportTimeout(Exception):
    """The environment's module was not imported in time."""


class World(Protocol):
    """One episode at a time. Calls raise RaisedInside, ProcessEnded, ImportTimeout, and TimeoutError after `timeout_s`.

    The pool turns these into errors that name the task. A call may be cancelled; `end` follows, always.
    """

    @property
    def alive(self) -> bool:
        """Whether it may serve another episode."""
        ...

    async def start(self) -> None:
        """Whatever comes before the first reset and is no fault of the task's."""
        ...

    async def reset(self, task: Mapping[str, Any], timeout_s: float) -> Observation: ...

    async def step(self, action: Action, timeout_s: float) -> Step: ...

    async def end(self, timeout_s: float, *, reuse: bool) -> str:
        """Frees all that it holds, within `timeout_s` and a few seconds; returns what went wrong, if anything.

        reuse: whether it may serve on, if it can.
        """
        ...

    async def discard(self) -> None:
        """Ends what `end` has kept for another episode."""
        ...


class LocalWorld:
    """An asynchronous environment; serves one episode only."""

    alive = False

    def __init__(self, path: str, kwargs: Mapping[str, Any]) -> None:
        self._path = path
        self._kwargs = kwargs
        self._environment: Environment | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Nothing: the module was imported when its kind was told."""

    async def reset(self, task: Mapping[str, Any], timeout_s: float) -> Observation:
        """Makes the environment, then its first words."""
        return checked(check_observation, await self._limited(self._made_and_reset(task), timeout_s))

    async def step(self, action: Action, timeout_s: float) -> Step:
        """One turn."""
        assert self._environment is not None, "step before reset"
        return checked(check_step, await self._limited(self._environment.step(action), timeout_s))

    async def end(self, timeout_s: float, *, reuse: bool) -> str:
        """Cancels what runs, closes the environment, cancels that at its limit."""
        complaint = ""
        if self._calls:
            await self._stop()
        try:
            if self._environment is not None:
                await self._limited(self._environment.close(), timeout_s)
        except TimeoutError:
            complaint = f"close took more than {timeout_s:g} s"
            await self._stop()
        except RaisedInside as error:
            complaint = f"close failed: {error}"
        if self._calls:
            complaint = f"it goes on although it was cancelled {_GRACE_S:g} s ago; let CancelledError pass"
        return complaint

    async def discard(self) -> None:
        """Nothing is kept."""

    async def _made_and_reset(self, task: Mapping[str, Any]) -> Observation:
        environment, _ = load_environment(self._path, self._kwargs)
        self._environment = environment  # type: ignore[assignment]  # the pool asked for its kind
        return await self._environment.reset(task)  # type: ignore[union-attr]

    async def _limited(self, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of `call`; RaisedInside, or TimeoutError with the call still running, which `end` stops.

        A task of its own: code that swallows CancelledError would hold up `asyncio.timeout` for ever.
        """
        running = asyncio.ensure_future(_guarded(call))
        self._calls.add(running)
        running.add_done_callback(self._calls.discard)
        done, _ = await asyncio.wait({running}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        if running.cancelled():
            raise RaisedInside("CancelledError: its code cancelled its own task")
        result = running.result()
        if isinstance(result, BaseException):
            raise RaisedInside(f"{type(result).__name__}: {result}\n{users_traceback(result)}") from result
        return result

    async def _stop(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.wait(self._calls, timeout=_GRACE_S)


async def _guarded(call: Coroutine[Any, Any, T]) -> T | Exception | SystemExit:
    """What `call` returns or raises. SystemExit, let through, would end the event loop."""
    try:
        return await call
    except (Exception, SystemExit) as error:
        return error


def checked(check: Callable[[Any], T], value: Any) -> T:
    """`check(value)`, whose TypeError becomes RaisedInside."""
    try:
        return check(value)
    except TypeError as error:
        raise RaisedInside(str(error)) from error
