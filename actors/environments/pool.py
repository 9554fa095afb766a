"""Environments of one kind: a bounded number of episodes at once, each under time limits, freed whatever happens.

    start   waits for a place (first come, first served), then for the environment's reset, tried anew where it fails
    step    waits for the environment, and for nothing else
    close   waits until the environment is gone and its place is free

An episode is a lease: it ends when its client closes it, when a call of it fails or is cancelled, after
`episode_timeout_s`, or with the pool. No call waits for another episode's call, and no lock is held over a wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from actors.environments.base import Action, Observation, Step, environment_kind
from actors.environments.config import EnvironmentConfig
from actors.environments.failures import Call
from actors.environments.ledger import Ledger, PoolReport
from actors.environments.places import Places
from actors.environments.process import EnvironmentProcess
from actors.environments.quarantine import task_key
from actors.environments.world import LocalWorld, World
from forge.errors import EnvironmentFailed, EnvironmentTimeout, EpisodeEnded

T = TypeVar("T")
_REMEMBERED_EPISODES = 4096
_GRACE_S = 10.0
"""For our own code to notice that it was cancelled, seconds."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Lease:
    """One episode."""

    id: str
    task: str
    turn: int = 0
    tools: frozenset[str] = frozenset()
    world: World | None = None
    has_place: bool = False
    call: asyncio.Task[Any] | None = None
    timer: asyncio.TimerHandle | None = None
    ending: asyncio.Task[None] | None = None
    why: str = ""


class EnvironmentPool:
    """Belongs to one event loop; works without Monarch.

    For any number of episodes at once: `start`, `step` any number of times, `close`. At the end `shutdown`.
    """

    def __init__(self, config: EnvironmentConfig, *, name: str = "environment") -> None:
        """name: of this kind, in errors and metrics. ConfigError, see `EnvironmentConfig.validate`; starts nothing."""
        config.validate()
        self._config = config
        self._name = name
        self._sync = environment_kind(config.path, config.kwargs) == "sync"
        self._places = Places(config.concurrency)
        # Last in, first out: a process that has served lately is in memory still.
        self._idle: list[World] = []
        self._leases: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._background: set[asyncio.Task[None]] = set()
        self._ledger = Ledger(name, config.quarantine_after)
        self._closed = False

    async def __aenter__(self) -> EnvironmentPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def start(self, task: Mapping[str, Any], *, episode: str = "") -> tuple[str, Observation]:
        """A new episode of `task`: its id, which `step` and `close` take, and what its environment says first.

        episode: an id of the caller's choice, so that `close` can end the episode while this call runs.
        Raises EnvironmentFailed, see forge/errors.py: a QuarantinedError at once for a task that is in quarantine.
        """
        lease = _Lease(episode or uuid.uuid4().hex, task_key(task))
        if self._closed:
            raise self._over(lease, "its pool is shut down")
        if lease.id in self._ended or lease.id in self._leases:
            raise self._over(lease, self._ended.get(lease.id, "an episode of this id runs already"))
        self._ledger.refuse_quarantined(lease.task)
        self._leases[lease.id] = lease
        observation = await self._run(lease, self._begin(lease, task))
        loop = asyncio.get_running_loop()
        lease.timer = loop.call_later(self._config.episode_timeout_s, self._expire, lease)
        self._ledger.count("episodes")
        return lease.id, observation

    async def step(self, episode: str, action: Action) -> Step:
        """One turn. Whatever fails, cancelling included, ends the episode.

        Raises EnvironmentFailed, see forge/errors.py: EpisodeEnded, with the reason, where the episode is over.
        """
        lease = self._leases.get(episode)
        if lease is None:
            why = self._ended.get(episode, "there was none of this id, or it is long ago")
            raise EpisodeEnded(f"environment {self._name}: episode {episode} is over: {why}", kind=self._name)
        if lease.call is not None:
            call = self._call(lease, self._config.turn_timeout_s)
            raise EnvironmentFailed(f"{call.where} is under way; wait for it before the next step", kind=self._name)
        lease.turn += 1
        return await self._run(lease, self._turn(lease, action))

    async def close(self, episode: str) -> None:
        """Ends the episode, a call of it in progress included. Of one that is over already: nothing."""
        lease = self._leases.get(episode)
        if lease is None:
            self._remember(episode, "its client closed it")
            return
        idle = lease.call is None
        if idle and lease.turn:
            self._ledger.succeeded(lease.task)
        await asyncio.shield(self._end(lease, "its client closed it", clean=idle))

    async def shutdown(self) -> None:
        """Ends every episode and process; calls in progress raise EpisodeEnded. May be called twice."""
        self._closed = True
        for lease in list(self._leases.values()):
            self._end(lease, "its pool is shut down", clean=False)
        while self._background:
            done, _ = await asyncio.wait(self._background)  # each has deadlines of its own
            self._background -= done
        while self._idle:
            await self._idle.pop().discard()

    def report(self) -> PoolReport:
        """Counts and times since the last report, and how things stand."""
        running = sum(lease.has_place for lease in self._leases.values())
        return self._ledger.report(running, self._places.waiting)

    async def _run(self, lease: _Lease, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, a task of its own, which the end of the lease cancels; its failure ends the lease."""
        call = lease.call = asyncio.create_task(work)
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:
            await asyncio.shield(self._end(lease, "a call of it was cancelled", clean=False))
            raise
        if lease.why:
            raise self._over(lease, lease.why)
        lease.call = None
        if error := call.exception():
            await asyncio.shield(self._end(lease, f"it failed with {type(error).__name__}", clean=False))
            raise error
        return call.result()

    async def _begin(self, lease: _Lease, task: Mapping[str, Any]) -> Observation:
        asked, config = time.monotonic(), self._config
        try:
            await self._places.take(config.place_timeout_s)
        except TimeoutError as error:
            waited = f"waited {config.place_timeout_s:g} s for one of the {config.concurrency} places, in vain"
            text = f"{self._call(lease, 0.0).where}: {waited}; raise concurrency or place_timeout_s"
            raise EnvironmentTimeout(text, kind=self._name, task=lease.task) from error
        lease.has_place = True
        queue_s = time.monotonic() - asked
        self._ledger.refuse_quarantined(lease.task)
        for left in reversed(range(config.retries + 1)):
            try:
                return await self._try_reset(lease, task, queue_s)
            except EnvironmentFailed:
                if not left or self._ledger.quarantined(lease.task):
                    raise
            world, lease.world = lease.world, None
            if world is not None:
                await asyncio.shield(self._behind(self._end_world(world, lease.task, reuse=False)))
            self._ledger.count("retries")
            queue_s = 0.0
        raise AssertionError("a reset either returns or raises")

    async def _try_reset(self, lease: _Lease, task: Mapping[str, Any], queue_s: float) -> Observation:
        call = self._call(lease, self._config.reset_timeout_s)
        lease.world = world = self._free_world()
        with self._ledger.keeping(call, blame=False):
            await world.start()
        with self._ledger.keeping(call, [self._name], queue_s, blame=True):
            observation = await world.reset(task, self._config.reset_timeout_s)
        lease.tools = frozenset(str(tool.get("function", tool).get("name")) for tool in observation.tools)
        return observation

    async def _turn(self, lease: _Lease, action: Action) -> Step:
        assert lease.world is not None, "a lease without a world has a call in progress"
        limit = self._config.turn_timeout_s
        called = [str(call.get("function", {}).get("name")) for call in action.tool_calls]
        # Only tools that there are: a policy invents names without end.
        names = [self._name, *(f"{self._name}/{tool}" for tool in dict.fromkeys(called) if tool in lease.tools)]
        with self._ledger.keeping(self._call(lease, limit), names, blame=True):
            step = await lease.world.step(action, limit)
        self._ledger.count("steps")
        return step

    def _free_world(self) -> World:
        """An idle process, which starts anew should it have died, else a new one."""
        if self._idle:
            return self._idle.pop()
        kind = EnvironmentProcess if self._sync else LocalWorld
        return kind(self._config.path, self._config.kwargs)

    def _expire(self, lease: _Lease) -> None:
        why = f"nobody had closed it {self._config.episode_timeout_s:g} s after its reset (episode_timeout_s)"
        self._ledger.count("expired")
        _log.warning("%s: ended, %s", self._call(lease, 0.0).where, why)
        self._end(lease, why, clean=False)

    def _end(self, lease: _Lease, why: str, *, clean: bool) -> asyncio.Task[None]:
        """Ends a lease, once; done when all that it holds is free."""
        if lease.ending is None:
            lease.why = why
            del self._leases[lease.id]
            self._remember(lease.id, why)
            if lease.timer is not None:
                lease.timer.cancel()
            lease.ending = self._behind(self._free(lease, clean=clean))
        return lease.ending

    async def _free(self, lease: _Lease, *, clean: bool) -> None:
        try:
            if lease.call is not None and not lease.call.done():
                lease.call.cancel()
                await asyncio.wait({lease.call}, timeout=_GRACE_S)
            if lease.call is not None and lease.call.done() and not lease.call.cancelled():
                lease.call.exception()  # seen: whoever ended the lease has said why
            if lease.world is not None:
                await self._end_world(lease.world, lease.task, reuse=clean)
        finally:
            if lease.has_place:
                self._places.give_back()

    async def _end_world(self, world: World, task: str, *, reuse: bool) -> None:
        try:
            complaint = await world.end(self._config.close_timeout_s, reuse=reuse)
        except Exception as error:  # its place must become free, and nobody may be waiting here
            complaint = f"it could not be ended: {type(error).__name__}: {error}"
        if complaint:
            self._ledger.count("close_failures")
            _log.warning("environment %s, task %r: %s", self._name, task, complaint)
        if world.alive:
            self._idle.append(world)

    def _behind(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that goes on when nobody waits for it, and that `shutdown` waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _remember(self, episode: str, why: str) -> None:
        self._ended.setdefault(episode, why)
        if len(self._ended) > _REMEMBERED_EPISODES:
            self._ended.popitem(last=False)

    def _over(self, lease: _Lease, why: str) -> EpisodeEnded:
        text = f"environment {self._name}, task {lease.task!r}: episode {lease.id} is over: {why}"
        return EpisodeEnded(text, kind=self._name, task=lease.task, turn=lease.turn)

    def _call(self, lease: _Lease, limit_s: float) -> Call:
        return Call(self._name, lease.task, lease.turn, limit_s)
