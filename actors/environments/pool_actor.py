"""Environments on meshes of their own: one actor for each kind, and all kinds as the controller sees them.

    Environments ──► EnvironmentClient, one a kind ──► EnvironmentActor ──► EnvironmentPool

Each kind has its own process and its own concurrency: nothing that one does reaches another, or a generator. A call
that its caller cancels or gives up ends the episode in the actor too: a client names its episodes itself, so that it
can close one whose `start` has not answered yet.

Unless `mesh.environment.on_failure` is end, an actor that dies takes its episodes with it, each of which has failed
as one whose environment broke; whoever begins one waits for the next actor (`forge/lasting.py`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from monarch.actor import concurrent_endpoint

from actors.environments.base import Action, Observation, Step
from actors.environments.config import EnvironmentConfig
from actors.environments.ledger import PoolReport
from actors.environments.pool import EnvironmentPool
from actors.environments.quarantine import task_key
from actors.worker_process import START_DEADLINE_S
from forge.errors import ActorFailed, ConfigError, DeadlineExceeded, EpisodeEnded
from forge.lasting import Beating, ask, ask_once, end, set_up
from forge.mesh import within
from forge.telemetry import span

__all__ = ["EnvironmentActor", "EnvironmentClient", "EnvironmentConfig", "Environments", "Pool"]

T = TypeVar("T")
_MARGIN_S = 30.0
"""For an actor to answer and to end what will not be cancelled, on top of the environments' own limits."""

_log = logging.getLogger(__name__)


class Pool(Protocol):
    """What `EnvironmentPool` and its client have in common; see there."""

    async def start(self, task: Mapping[str, Any], *, episode: str = "") -> tuple[str, Observation]: ...

    async def step(self, episode: str, action: Action) -> Step: ...

    async def close(self, episode: str) -> None: ...

    async def shutdown(self) -> None: ...


class EnvironmentActor(Beating):
    """One process, one EnvironmentPool."""

    def __init__(self, config: EnvironmentConfig, name: str = "environment") -> None:
        self._pool = EnvironmentPool(config, name=name)

    @concurrent_endpoint
    async def start(self, task: dict[str, Any], episode: str) -> Observation:
        """See `EnvironmentPool.start`."""
        with span("turns", "reset", episode=episode):
            _, observation = await self._pool.start(task, episode=episode)
        return observation

    @concurrent_endpoint
    async def step(self, episode: str, action: Action) -> Step:
        """See `EnvironmentPool.step`."""
        with span("turns", "step", episode=episode):
            return await self._pool.step(episode, action)

    @concurrent_endpoint
    async def close(self, episode: str) -> None:
        """See `EnvironmentPool.close`."""
        await self._pool.close(episode)

    @concurrent_endpoint
    async def report(self) -> PoolReport:
        """See `EnvironmentPool.report`."""
        return self._pool.report()

    @concurrent_endpoint
    async def shutdown(self) -> None:
        """See `EnvironmentPool.shutdown`."""
        await self._pool.shutdown()


class EnvironmentClient:
    """`EnvironmentPool`'s calls over a mesh of one EnvironmentActor; its errors arrive as themselves."""

    def __init__(self, mesh: Any, config: EnvironmentConfig, *, name: str = "environment") -> None:
        """`config` and `name` as the actor has them. mesh: `setup` comes first where it may be respawned."""
        self._mesh = mesh
        self._name = name
        end_s = config.close_timeout_s + _MARGIN_S
        one_try_s = START_DEADLINE_S + config.reset_timeout_s + end_s
        self._start_s = config.place_timeout_s + (1 + config.retries) * one_try_s
        self._step_s = config.turn_timeout_s + end_s
        self._close_s = end_s
        self._closing: set[asyncio.Task[None]] = set()

    async def setup(self) -> None:
        """Waits until the actor answers, which it does in each of its lives before anything else."""
        await set_up(self._mesh, lambda mesh: within(self._close_s, f"environments {self._name}", mesh.beat.call_one()))

    async def start(self, task: Mapping[str, Any], *, episode: str = "") -> tuple[str, Observation]:
        """See `EnvironmentPool.start`."""
        episode = episode or uuid.uuid4().hex
        call = ask(self._mesh, lambda mesh: mesh.start.call_one(dict(task), episode))
        return episode, await self._call(self._start_s, f"begin task {task_key(task)!r}", call, episode)

    async def step(self, episode: str, action: Action) -> Step:
        """See `EnvironmentPool.step`."""
        call: Awaitable[Step] = ask_once(self._mesh, lambda mesh: mesh.step.call_one(episode, action))
        try:
            return await self._call(self._step_s, f"take a step of episode {episode}", call, episode)
        except ActorFailed as error:
            text = f"environment {self._name}: episode {episode} is over: {error}"
            raise EpisodeEnded(text, kind=self._name) from error

    async def close(self, episode: str) -> None:
        """See `EnvironmentPool.close`."""
        call = ask_once(self._mesh, lambda mesh: mesh.close.call_one(episode))
        with suppress(ActorFailed):  # its episodes went with it
            await self._call(self._close_s, f"close episode {episode}", call)

    async def report(self) -> PoolReport:
        """See `EnvironmentPool.report`."""
        call: Awaitable[PoolReport] = ask_once(self._mesh, lambda mesh: mesh.report.call_one())
        return await self._call(_MARGIN_S, "report", call)

    async def shutdown(self) -> None:
        """See `EnvironmentPool.shutdown`."""
        if self._closing:
            await asyncio.wait(self._closing)  # each has a deadline
        await self._call(2 * self._close_s, "shut down", end(self._mesh, lambda mesh: mesh.shutdown.call_one()))

    async def _call(self, seconds: float, what: str, call: Awaitable[T], episode: str = "") -> T:
        """The answer to `call`; `episode`, if given, is closed when nobody waits for the answer any more."""
        try:
            return await within(seconds, f"the environments {self._name} to {what}", call)
        except (asyncio.CancelledError, DeadlineExceeded):
            if episode:
                closing = asyncio.create_task(self._close_behind(episode))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            raise

    async def _close_behind(self, episode: str) -> None:
        try:
            await self.close(episode)
        except Exception as error:  # whoever gave the episode up waits for nothing here; a dead actor shows elsewhere
            _log.warning("environments %s: episode %s was not closed: %s", self._name, episode, error)


class Environments:
    """Several kinds, each with a pool of its own; a task's `environment` says which, where there is more than one."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        """`pools` by the name of their kind."""
        if not pools:
            raise ConfigError("there is no environment; give at least one")
        if bad := [name for name in pools if not name or "/" in name]:
            raise ConfigError(f"an environment is called {bad[0]!r}; give it a name without a slash")
        self._pools = dict(pools)

    def kind_of(self, task: Mapping[str, Any]) -> str:
        """Name of the kind that `task` runs in; ConfigError where it names none that there is."""
        kind = task.get("environment")
        if kind is None and len(self._pools) == 1:
            return next(iter(self._pools))
        if kind not in self._pools:
            raise ConfigError(
                f"task {task_key(task)!r} has environment {kind!r}, which is none of {', '.join(self._pools)}; "
                "name one of them"
            )
        return str(kind)

    async def start(self, task: Mapping[str, Any]) -> tuple[str, Observation]:
        """See `EnvironmentPool.start`, of the task's kind."""
        kind = self.kind_of(task)
        return await self._pools[kind].start(task, episode=f"{kind}/{uuid.uuid4().hex}")

    async def step(self, episode: str, action: Action) -> Step:
        """See `EnvironmentPool.step`."""
        return await self._pool_of(episode).step(episode, action)

    async def close(self, episode: str) -> None:
        """See `EnvironmentPool.close`."""
        await self._pool_of(episode).close(episode)

    async def shutdown(self) -> None:
        """Shuts every pool down."""
        await asyncio.gather(*(pool.shutdown() for pool in self._pools.values()))

    def _pool_of(self, episode: str) -> Pool:
        """Episodes carry the name of their kind."""
        return self._pools[episode.partition("/")[0]]
