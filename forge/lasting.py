"""Actors without a state of their own, through all their lives: a call that one life cannot answer goes to the next.

    spawn = lasting(cluster.spawn, cfg.failure_policy("reward"), log.note, guards)
    mesh = await spawn("reward", RewardActor, cfg)                  # a Lasting; with the policy end, the plain mesh
    await set_up(mesh, lambda mesh: mesh.setup.call_one())          # done again in each life, before it is asked
    await ask(mesh, lambda mesh: mesh.score.call_one(samples))      # both work on plain meshes too

An actor with an endpoint `beat`, as `Beating` has, is asked for heartbeats.

Who waits: a call, for the life that runs to answer or to die, then for the next one to be set up. Its caller's deadline
is over all of that; a restart either succeeds or ends the run (`forge.supervision`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint
from tensordict import TensorDict

from forge import channel
from forge.errors import ActorFailed, ForgeError
from forge.failure import is_supervision_error, remote_exception
from forge.supervision import NOTICE_S, FailurePolicy, Guard
from forge.telemetry import Report, drain

T = TypeVar("T")
Spawn = Callable[..., Awaitable[Any]]
"""`forge.mesh.Cluster.spawn`."""
MOST_LIVES = 5
"""A call that so many have died under is taken to be what kills them."""


class Beating(Actor):
    """An actor that can be asked for heartbeats, and for what it has measured."""

    @concurrent_endpoint
    async def beat(self) -> None:
        """An answer is all that is asked for."""

    @concurrent_endpoint
    async def telemetry(self, spans: bool) -> Report:
        """See `forge.telemetry.Telemetry.drain`."""
        return drain(spans)


class Life:
    """One mesh of a guarded replica: its calls fail with ActorFailed as soon as it is known to be dead."""

    def __init__(self, name: str, report: Callable[[str], None] | None, *, ranks: int = 1) -> None:
        """report: takes the reason of a death that only failing calls tell of; None where a death ends the run.
        ranks: of several, one may die and the others raise, before the news of it."""
        self._name, self._report, self._ranks = name, report, ranks
        self._lost = asyncio.get_running_loop().create_future() if report else None

    @property
    def lost(self) -> bool:
        """Whether it is dead, and another is to take its place."""
        return self._lost is not None and self._lost.done()

    def lose(self, reason: str) -> None:
        """Fails the calls that run, and all later ones."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    async def ask(self, call: Awaitable[T]) -> T:
        """The answer to `call`."""
        if self._lost is None or self._report is None:
            return await call
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait([answer, self._lost], return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                error = None if answer.cancelled() else answer.exception()
                own = remote_exception(error) if error else None
                if isinstance(own, ActorFailed):  # it says so itself: what it cannot do without has died
                    self._report(own.reason)
                    self.lose(own.reason)
                elif error is None:
                    return answer.result()
                elif is_supervision_error(error):
                    await self._told(error)
                else:
                    if own is not None and self._ranks > 1 and not isinstance(own, ForgeError):
                        await asyncio.wait([self._lost], timeout=NOTICE_S)
                    if not self.lost:
                        return answer.result()
        finally:
            answer.cancel()
        raise ActorFailed(self._name, self._lost.result())

    async def _told(self, error: BaseException) -> None:
        """Monarch knows before we do: of what it died arrives by another way, if its processes are this node's."""
        assert self._lost is not None
        assert self._report is not None
        await asyncio.wait([self._lost], timeout=NOTICE_S)
        if not self.lost:
            self._report(f"calls to it fail: {error}")
            self.lose("calls to it fail")


def given_up(deaths: list[ActorFailed], what: str) -> ActorFailed:
    """Why the call `what` is not tried again, after `MOST_LIVES` deaths."""
    text = f"{len(deaths)} have died under the call {what}, one after another: it is not tried again"
    return ActorFailed(deaths[0].name, f"{deaths[0].reason}\n{text}")


class Lasting:
    """The mesh of an actor without state, through all its lives."""

    def __init__(self, spawn: Callable[[], Awaitable[Any]], guard: Guard) -> None:
        self._spawn, self._guard = spawn, guard
        self._set_up: Callable[[Any], Awaitable[Any]] | None = None
        self._serves = asyncio.Event()

    async def set_up(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        """Begins the first life. `call` is what each one begins with; from here on a death is not the run's."""
        self._set_up = call
        await self._guard.start(self._revive)
        beats = hasattr(self._mesh, "beat")
        self._guard.arm(self._lose, self._revive, (lambda: self._mesh.beat.call_one()) if beats else None)

    def _lose(self, reason: str) -> None:
        self._serves.clear()
        self._life.lose(reason)

    async def _revive(self) -> None:
        self._mesh = await self._spawn()
        self._life = Life(self._guard.name, self._guard.reporter())
        assert self._set_up is not None, "each life begins with it"
        await self._life.ask(self._set_up(self._mesh))
        self._serves.set()

    @property
    def serves(self) -> bool:
        """Whether there is a life that can be asked."""
        return self._serves.is_set()

    async def ask_once(self, call: Callable[[Any], Awaitable[T]]) -> T:
        """The answer of the life of now."""
        return await self._life.ask(call(self._mesh))

    async def ask(self, call: Callable[[Any], Awaitable[T]], lives: float = MOST_LIVES) -> T:
        """The answer of a life; `call` is made anew for each. Raises ActorFailed when it has killed `lives` of them.

        lives: infinity for calls that wait for others, which are pending whenever something else kills the actor.
        """
        deaths: list[ActorFailed] = []
        while len(deaths) < lives:
            await self._serves.wait()
            life = self._life
            try:
                return await self.ask_once(call)
            except ActorFailed as error:
                if not life.lost:
                    raise
                deaths.append(error)
        raise given_up(deaths, f"to {self._guard.name}")


def lasting(spawn: Spawn, policy: FailurePolicy, told: Callable[[str], None], guards: list[Guard]) -> Spawn:
    """`spawn` for roles without state: unless `policy` says end, it gives a Lasting, whose guard joins `guards`.

    Its processes start as it is set up.
    """
    if policy.on_failure == "end":
        return spawn

    async def start(*args: Any, **kwargs: Any) -> Lasting:
        guards.append(guard := Guard(policy, told))
        return Lasting(lambda: spawn(*args, **kwargs, guard=guard), guard)

    return start


async def ask(mesh: Any, call: Callable[[Any], Awaitable[T]], lives: float = MOST_LIVES) -> T:
    """The answer to `call(mesh)`, of another life where the first one dies. `lives`: as `Lasting.ask` has it."""
    return await (mesh.ask(call, lives) if isinstance(mesh, Lasting) else call(mesh))


async def ask_of_group(
    mesh: Any, group: TensorDict, call: Callable[[Any, Any], Awaitable[T]], lives: float = MOST_LIVES
) -> T:
    """The answer to `call(mesh, handle)`, of another life where the first one dies; each gets a handle on `group`."""

    async def handed_over(mesh: Any) -> T:
        handle = await asyncio.to_thread(channel.put, group)
        try:
            return await call(mesh, handle)
        finally:
            channel.close(handle)  # where it died before it took the group

    return await ask(mesh, handed_over, lives)


async def ask_once(mesh: Any, call: Callable[[Any], Awaitable[T]]) -> T:
    """The answer to `call(mesh)` of the life of now; ActorFailed where that dies, or has died."""
    return await (mesh.ask_once(call) if isinstance(mesh, Lasting) else call(mesh))


async def end(mesh: Any, call: Callable[[Any], Awaitable[Any]]) -> None:
    """What comes last; nothing where there is nobody to end."""
    if not isinstance(mesh, Lasting):
        await call(mesh)
    elif mesh.serves:
        with contextlib.suppress(ActorFailed):
            await mesh.ask_once(call)


async def set_up(mesh: Any, call: Callable[[Any], Awaitable[Any]]) -> None:
    """What comes before all calls, in each life."""
    await (mesh.set_up(call) if isinstance(mesh, Lasting) else call(mesh))
