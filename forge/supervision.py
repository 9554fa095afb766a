"""What becomes of a replica whose process has died: a new one in its place, or the end of the run.

Who notices     DeathWatch (the kernel, at once), Monarch's poll (another node; an actor that died in a living process),
                a call that Monarch fails with a SupervisionError, and heartbeats, for a hang that none of them sees: a
                stopped process, code that holds the GIL. `MISSED_BEATS` of them unanswered in a row are a death. They
                are asked once a replica serves, each with a deadline of its own, so that a pause of the controller is
                no silence of a replica. All end in `Cluster.fail(mesh, reason)` or beside it in `Supervisor.takes`;
                the first news of a mesh counts, later news of the same mesh is dropped.
Who decides     the policy of the role in the configuration, `mesh.<role>.on_failure`, and its budget: more than
                `max_restarts` within `restart_window_s` seconds end the run, and of the reasons the first is on top.
Who respawns    a task of the supervisor: the dead mesh's processes are killed by their mark, its mesh is stopped behind
                everybody's back, and `revive(life)` spawns the same placement as a mesh of a name of its own
                (`generator_0_life1`), so that news of the old one can never be taken for news of the new one. A death
                in the middle of that ends the attempt, and counts.
Who waits       whoever called the dead replica: `lost(reason)` is called before anything else happens, which fails the
                calls that run. Generators ask another replica, or wait for this one, from the tokens that had come
                (`actors.generators.Generators`). The update that runs forgets the replica (`WeightSync.leave`). The
                trainer waits for nobody here; with no replica alive, rollouts wait, then it does, for a batch.
How it rejoins  the last thing that `revive` does: `WeightSync.join` brings the replica to the newest version, and only
                then it takes requests.

The start of a run is shorter: until `Guard.arm` a death is news for `Guard.start` alone, which begins the first life
once more, within the same budget. What `begin` itself raises is raised.

A role without a guard, which is any role of a user's own, ends the run as it dies.

    guard = Guard(cfg.failure_policy("generator"), told=log.note)
    replica = await guard.start(begin)          # begin: cluster.spawn("generator", Generator, cfg, guard=guard), set-up
    guard.arm(lost=..., revive=...)             # revive: begin, and what brings the replica back into the run
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from forge.errors import ConfigError, NodeLost
from forge.failure import first_line, is_supervision_error
from forge.processes import DeathWatch
from forge.telemetry import span
from forge.trace import RESTARTS

T = TypeVar("T")
NOTICE_S = DeathWatch.grace_s + 1.0
"""How long after a call to a dead actor has failed the reason of its death may arrive, seconds."""
_LOOK_S = 0.05


async def news(came: Callable[[], bool], seconds: float = NOTICE_S) -> None:
    """Waits until word of a death has come, behind a failure that may be its consequence; `seconds` at most."""
    for _ in range(int(seconds / _LOOK_S)):
        if came():
            return
        await asyncio.sleep(_LOOK_S)


@dataclass
class FailurePolicy:
    """What a death of one of the role's processes leads to."""

    on_failure: Literal["auto", "end", "respawn"] = field(default="auto", kw_only=True)
    """end: the run ends with the cause. respawn: a new replica takes the place of the dead one. auto: respawn where the
    role and the other options let it."""
    max_restarts: int = field(default=3, kw_only=True)
    """Restarts of one replica within restart_window_s; one more ends the run."""
    restart_window_s: float = field(default=600.0, kw_only=True)
    """Seconds after which a restart counts no longer."""
    heartbeat_s: float = field(default=30.0, kw_only=True)
    """Seconds between two heartbeats of what would be respawned, and for each of them; four in a row that are not
    answered are a death. 0 asks none."""

    def check(self, where: str) -> None:
        """Raises ConfigError; `where` is the section's name, such as mesh.generator."""
        if not self.heartbeat_s >= 0:
            raise ConfigError(f"{where}.heartbeat_s must be >= 0, got {self.heartbeat_s:g}; 0 asks for none")
        if self.max_restarts < 1 or not self.restart_window_s > 0:
            raise ConfigError(
                f"{where}.max_restarts is {self.max_restarts}, restart_window_s {self.restart_window_s:g}; the former "
                "must be >= 1, the latter > 0; on_failure end restarts nothing"
            )

    def settled(self, *, possible: bool) -> FailurePolicy:
        """The policy with end or respawn in place of auto."""
        if self.on_failure != "auto":
            return self
        return replace(self, on_failure="respawn" if possible else "end")


MISSED_BEATS = 4
"""Heartbeats in a row that a hung process does not answer; a busy one answers some."""


class Budget:
    """Of one replica's restarts: a crash loop ends the run. Pure, but for the clock."""

    def __init__(self, policy: FailurePolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._spent: deque[tuple[float, str]] = deque()
        self._in_a_row = 0

    def spend(self, reason: str) -> bool:
        """Whether there is a restart left for a death for `reason`."""
        now = self._clock()
        while len(self._spent) > self._in_a_row and now - self._spent[0][0] > self._policy.restart_window_s:
            self._spent.popleft()
        self._spent.append((now, reason))
        self._in_a_row += 1
        return len(self._spent) <= self._policy.max_restarts

    def served(self) -> None:
        """The restart was one: it counts for the window. Those that come to nothing count however long they take."""
        self._in_a_row = 0

    def account(self) -> str:
        """Why there is none left: the first cause, then how often it was tried, then the last one."""
        reasons = [reason for _, reason in self._spent]
        tried = f"it was restarted {len(reasons) - 1} times "
        tried += "in a row" if self._in_a_row == len(reasons) else f"within {self._policy.restart_window_s:g} s"
        last = "" if reasons[-1] == reasons[0] else f", and at last: {reasons[-1]}"
        return f"{reasons[0]}\n{tried} (max_restarts){last}"


class Guard:
    """One replica under a policy, through all its lives. Belongs to one event loop."""

    def __init__(self, policy: FailurePolicy, told: Callable[[str], None] = print) -> None:
        """told: gets a line when the replica fails, and one when it serves again."""
        self.policy, self.told, self.budget = policy, told, Budget(policy)
        self.role = self.name = self.mesh = ""
        self.meshes: list[str] = []
        """Its own one, and those of the roles that live and die with it."""
        self.life = 0
        """How many meshes it had before this one."""
        self.restarts = 0
        """How often it took up its work again."""
        self.armed = False
        self.begins = policy.on_failure != "end"
        """Whether it has yet to be armed: a death is made up for by `start` then."""
        self.attempt: asyncio.Future[Any] | None = None
        self.died = ""
        """Why the attempt that runs cannot succeed any more; before it is armed, why what was there is dead."""
        self.lose: Callable[[str], None] = _nobody
        """Told of the reason of a death before it is armed: whoever may be waiting for the mesh then."""
        self.needed: Callable[[], bool] = lambda: True
        """Whether the run has not come to where nobody misses the replica: from there on a death is nothing."""
        self._fail: Callable[[str, str], None] | None = None
        self.supervisor: Supervisor | None = None

    async def start(self, begin: Callable[[], Awaitable[T]]) -> T:
        """What `begin` gives, which spawns a mesh with this guard and sets it up; again, where the mesh dies meanwhile.

        Also to be called when what `begin` gave before is dead (`died`).
        """
        while True:
            if self.died:
                self.told(f"{self.name} failed while the run started: {first_line(self.died)}; it is started again")
                self.life, self.died = self.life + 1, ""
            self.lose = _nobody
            attempt = await self.ended(asyncio.ensure_future(begin()))
            error = None if attempt.cancelled() else attempt.exception()
            if error is not None and is_supervision_error(error):
                await news(lambda: bool(self.died))
            if not self.died:
                return attempt.result()

    async def ended(self, attempt: asyncio.Future[T]) -> asyncio.Future[T]:
        """The attempt at a life, once it has ended one way or another; a death ends it."""
        self.attempt = attempt
        try:
            await asyncio.wait([attempt])
        finally:
            self.attempt = None
            attempt.cancel()  # does nothing, unless this task is cancelled
        return attempt

    def arm(
        self,
        lost: Callable[[str], None],
        revive: Callable[[], Awaitable[None]],
        beat: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """From now on a death is not the run's, where the policy says so; one that was kept for this has effect.

        lost: called with the reason at once; whoever waits for the replica has to hear of it. revive: spawns another
        mesh with this guard, sets it up and gives it its work. beat: asks the mesh of now for what costs it nothing.
        """
        self.enlist(lost, revive, beat)
        self.budget.served()
        self.armed = self.supervisor is not None and self.policy.on_failure != "end"
        if self.armed and self.supervisor is not None:
            self.supervisor.take_up(self)

    def enlist(
        self,
        lost: Callable[[str], None],
        revive: Callable[[], Awaitable[None]],
        beat: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """As `arm`, for a replica that has no life yet; `Supervisor.begin` gives it one."""
        self.lost, self.revive, self.beat = lost, revive, beat

    def disarm(self) -> None:
        """From now on a death is the run's again, and nothing is revived."""
        self.armed = self.begins = False
        if self.attempt is not None:
            self.attempt.cancel()

    def reporter(self) -> Callable[[str], None] | None:
        """What takes the reason why the mesh of now does not answer; None where its death is the run's."""
        if self._fail is None or self.policy.on_failure == "end":
            return None
        return partial(self._fail, self.mesh)

    def bind(self, role: str, name: str, fail: Callable[[str, str], None]) -> str:
        """The name of the mesh of this life of the replica `name`; its death is told to `fail`.

        The first name is the replica's own. What is bound beside it, a trainer's critic, lives and dies with it.
        """
        mesh = f"{name}_life{self.life}" if self.life else name
        if name == self.name or not self.name:
            self.role, self.name, self._fail = role, name, fail
            self.mesh, self.meshes = mesh, []
        self.meshes.append(mesh)
        return mesh


class Supervisor:
    """Restarts what is guarded. Belongs to one event loop.

    bury: called with the name of a dead mesh, ends what is left of it. give_up: called with a replica's name and
    the reason, ends the run.
    """

    def __init__(self, bury: Callable[[str], None], give_up: Callable[[str, str], None]) -> None:
        self._bury, self._give_up = bury, give_up
        self._guards: dict[str, Guard] = {}
        self._all: list[Guard] = []
        self._dead: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, guard: Guard) -> None:
        """The death of the guard's meshes is the guard's, once it is armed."""
        assert self._dead.isdisjoint(guard.meshes), "the name of a mesh is used once"
        self._guards |= dict.fromkeys(guard.meshes, guard)
        if guard not in self._all:
            self._all.append(guard)
        guard.supervisor = self

    def take_up(self, guard: Guard) -> None:
        """The guard is armed: restarts what has died already."""
        if guard.died:
            guard.lost(guard.died)
            self._start(self._restart(guard, guard.died, counted=True))
        else:
            self.listen(guard)

    def listen(self, guard: Guard) -> None:
        """Asks the mesh of now for heartbeats, until it is dead."""
        if guard.beat is not None and guard.policy.heartbeat_s > 0:
            self._start(self._listen(guard, guard.mesh, guard.beat))

    async def _listen(self, guard: Guard, mesh: str, beat: Callable[[], Awaitable[object]]) -> None:
        seconds, missed, heard = guard.policy.heartbeat_s, 0, time.monotonic()
        while missed < MISSED_BEATS:
            await asyncio.sleep(seconds)
            if not guard.armed or mesh in self._dead:
                return
            try:
                async with asyncio.timeout(seconds):
                    await beat()
                missed, heard = 0, time.monotonic()
            except TimeoutError:
                missed += 1
            except Exception:
                missed = 0  # that is an answer, or a death, of which others tell more
        if guard.armed and mesh not in self._dead:
            self.takes(mesh, f"it did not answer for {time.monotonic() - heard:.0f} s ({missed} heartbeats)")

    def takes(self, mesh: str, reason: str) -> bool:
        """Whether the death of `mesh` is dealt with here; the caller has nothing more to do then."""
        if mesh in self._dead:
            return True
        guard = self._guards.get(mesh)
        if guard is None or not (guard.armed or guard.begins):
            return False
        if mesh != guard.mesh:
            reason = f"its {mesh.removesuffix(f'_life{guard.life}')} failed: {reason}"
        meshes = self._forget(guard)
        (guard.lost if guard.armed else guard.lose)(reason)
        for dead in meshes:
            self._bury(dead)
        if not guard.armed and not guard.budget.spend(reason):
            self._give_up(guard.name, guard.budget.account())
        elif guard.attempt is not None:
            guard.died = reason
            guard.attempt.cancel()
        elif guard.armed:
            self._start(self._restart(guard, reason))
        else:
            guard.died = reason
        return True

    async def begin(self, guard: Guard) -> str:
        """Gives a replica its first life, in a run that goes on; why that failed, which ends nothing, or ""."""
        guard.supervisor, guard.armed = self, True  # a death before it serves is this attempt's, whatever the policy
        try:
            attempt = await guard.ended(self._start(_run(guard.revive)))
        except asyncio.CancelledError:
            await self.release(guard)
            raise
        error = None if attempt.cancelled() else attempt.exception()
        if error is None and not guard.died and not attempt.cancelled():
            guard.armed = guard.policy.on_failure != "end"
            self.listen(guard)
            return ""
        await self.release(guard)
        return guard.died or (f"{type(error).__name__}: {error}" if error else "its start was cancelled")

    async def release(self, guard: Guard, goodbye: Callable[[], Awaitable[object]] | None = None) -> None:
        """The replica leaves the run: from here on no news of its end counts. `goodbye` comes first, if it can."""
        guard.disarm()
        if guard in self._all:
            self._all.remove(guard)
        if meshes := self._forget(guard):
            if goodbye is not None:
                with contextlib.suppress(Exception):
                    await goodbye()
            for mesh in meshes:
                self._bury(mesh)

    async def close(self) -> None:
        """Nothing is restarted any more; what is under way is cancelled."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _restart(self, guard: Guard, reason: str, *, counted: bool = False) -> None:
        """Tries until the replica serves again, or its budget is spent; of that the first try may be `counted`."""
        begin = time.monotonic()
        while guard.armed:
            if not guard.needed():
                await self.release(guard)
                return
            if not counted and not guard.budget.spend(reason):
                self._give_up(guard.name, guard.budget.account())
                return
            counted = False
            guard.told(f"{guard.name} failed: {first_line(reason)}; it is being restarted")
            guard.life, guard.died = guard.life + 1, ""
            with span(RESTARTS, guard.name, reason=first_line(reason)):
                attempt = await guard.ended(self._start(_run(guard.revive)))
            if not guard.armed or (attempt.cancelled() and not guard.died):
                return
            error = None if attempt.cancelled() else attempt.exception()
            if error is None and not guard.died:
                guard.restarts += 1
                guard.budget.served()
                self.listen(guard)
                guard.told(f"{guard.name} serves again, {time.monotonic() - begin:.1f} s after it failed")
                return
            if isinstance(error, NodeLost):
                self._retire(guard, str(error).removeprefix(f"{guard.mesh} cannot start: "))
                return
            reason = guard.died or f"its restart failed: {type(error).__name__}: {error}"
            for mesh in self._forget(guard):
                self._bury(mesh)

    def _forget(self, guard: Guard) -> list[str]:
        """The meshes of the guard that were alive; they are dead from here on."""
        meshes = [mesh for mesh in guard.meshes if self._guards.pop(mesh, None) is not None]
        self._dead.update(meshes)
        return meshes

    def _retire(self, guard: Guard, reason: str) -> None:
        """Its node is gone, so it has no place any more: others of its role go on, or else the run ends."""
        guard.disarm()
        others = [other.name for other in self._all if other.role == guard.role and other.armed]
        if others:
            guard.told(f"{reason}; the run goes on with {', '.join(others)}")
        else:
            self._give_up(guard.name, reason)


def _nobody(reason: str) -> None:
    """Nobody waits."""


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()
