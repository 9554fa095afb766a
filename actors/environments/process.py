"""A synchronous environment in a worker process of its own, as the pool sees it.

    EnvironmentProcess ──► WorkerProcess ──► actors/environments/process_worker.py

The process serves one episode after the other, each with a new environment, and is killed when a call is over its
time, is cancelled, or an episode ends badly; what the environment has started dies with it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from actors.environments.base import Action, Observation, Step, check_observation, check_step
from actors.environments.world import ImportTimeout, ProcessEnded, RaisedInside, checked
from actors.worker_process import START_DEADLINE_S, WorkerGone, WorkerProcess


class EnvironmentProcess:
    """A World for one episode after the other, one call at a time."""

    def __init__(self, path: str, kwargs: Mapping[str, Any]) -> None:
        self._path = path
        self._kwargs = dict(kwargs)
        self._worker = WorkerProcess("actors.environments.process_worker")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._worker.running

    async def start(self) -> None:
        """Starts the process, unless it runs, and has it import the environment's module.

        That has a deadline of its own, `START_DEADLINE_S`; ImportTimeout after it.
        """
        if self.alive:
            return
        try:
            await self._worker.start()
        except OSError as error:
            raise ProcessEnded(f"it could not be started: {error}") from error
        except WorkerGone as error:
            raise ProcessEnded(error.status) from error
        try:
            await self._ask(("import", self._path), START_DEADLINE_S)
        except TimeoutError as error:
            raise ImportTimeout(f"{self._path} was not imported within {START_DEADLINE_S:g} s") from error

    async def reset(self, task: Mapping[str, Any], timeout_s: float) -> Observation:
        """A new environment's first words; starts the process where none runs."""
        await self.start()
        return checked(check_observation, await self._ask(("reset", self._path, self._kwargs, task), timeout_s))

    async def step(self, action: Action, timeout_s: float) -> Step:
        """One turn of the environment that was reset last."""
        return checked(check_step, await self._ask(("step", action), timeout_s))

    async def end(self, timeout_s: float, *, reuse: bool) -> str:
        """Closes the environment; the process goes on only for `reuse` after a clean close.

        Returns what went wrong over it, if anything. A process that was killed has nothing to close.
        """
        complaint = ""
        if self.alive:
            try:
                await self._ask(("close",), timeout_s)
            except TimeoutError:
                complaint = f"close took more than {timeout_s:g} s"
            except (RaisedInside, ProcessEnded) as error:
                complaint = f"close failed: {error}"
        if complaint or not reuse:
            await self.discard()
        return complaint

    async def discard(self) -> None:
        """Ends the process and waits until it is gone."""
        await self._worker.close()

    async def _ask(self, request: tuple[Any, ...], timeout_s: float) -> Any:
        verb = request[0]
        try:
            message = pickle.dumps(request)
        except Exception as error:
            raise RaisedInside(f"{verb} was given what cannot go to another process ({error})") from error
        try:
            answer = await self._worker.ask(message, timeout_s)
        except WorkerGone as error:
            raise ProcessEnded(error.status) from error
        try:
            tag, value = pickle.loads(answer)
        except Exception as error:
            raise RaisedInside(f"{verb} returned what cannot be read in this process ({error})") from error
        if tag == "error":
            raise RaisedInside(value)
        return value
