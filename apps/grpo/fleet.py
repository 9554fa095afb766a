"""The generators of a run: those that it began with, those that come later, and those that leave.

    python -m apps.scale RUN 3 ──► RUN/scale.json ──► follow ──► begins replicas, or lets them go, one after another

    comes     the supervisor starts it as the successor of a dead one; it joins the weight updates and holds the newest
              version before it takes requests. One that cannot start is told of, and ends nothing.
    leaves    it takes no request any more, keeps its weights up to date until those that it has have ended, and ends.
    dies      another takes its place, see `forge/supervision.py`.

Nobody waits for `follow`. A replica's device slots are kept for it from the start of the run
(`mesh.generator.max_replicas`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from actors.generators import Generators, Replica
from forge.failure import first_line
from forge.mesh import within
from forge.supervision import FailurePolicy, Guard
from weightsync.sync import WeightSync

WISH = "scale.json"
"""In the run folder: {"generators": how many are wanted}."""
_LOOK_S = 1.0
_ENDS_S = 60.0
"""For an engine that has nothing to do any more, seconds."""


class Lives(Protocol):
    """Who starts and ends guarded replicas: `forge.mesh.Cluster`, or one policy's part of it."""

    async def begin(self, guard: Guard) -> str: ...

    async def release(self, guard: Guard, goodbye: Callable[[], Awaitable[object]]) -> None: ...


class Member:
    """One replica through all its lives."""

    def __init__(self, fleet: Fleet, index: int, guard: Guard, replica: Replica | None = None) -> None:
        self.name, self.guard, self.replica = f"generator_{index}", guard, replica
        self._fleet, self._index = fleet, index
        self.call = (self._lost, self._revive, self._beat)
        """What `Guard.arm` takes."""
        guard.needed = lambda: not fleet.sync.ended

    def _lost(self, reason: str) -> None:
        if self.replica is not None:
            self._fleet.generators.lose(self.replica, reason)
            self._fleet.sync.leave(self.replica)

    async def _revive(self) -> None:
        self.replica = await self._fleet.start(self._index, self.guard)
        await self._fleet.sync.join(self.replica)
        self._fleet.generators.add(self.replica)

    async def _beat(self) -> None:
        if self.replica is not None:
            await self.replica.ask(self.replica.mesh.beat.call_one())


class Fleet:
    """All replicas by their number. Belongs to one event loop."""

    def __init__(
        self,
        meshes: Lives,
        start: Callable[[int, Guard], Awaitable[Replica]],
        generators: Generators,
        sync: WeightSync,
        policy: FailurePolicy,
        note: Callable[[str], None],
        most: int,
    ) -> None:
        """`start` gives replica number `index`, its engine running; `most` of them have a place to run."""
        self.start, self.generators, self.sync = start, generators, sync
        self.guards: list[Guard] = []
        """Of all replicas that there have been."""
        self._meshes, self._policy, self._note, self.most = meshes, policy, note, most
        self._members: dict[int, Member] = {}
        self._lives: dict[int, int] = {}
        """Of those that have left or could not start: the name of a mesh is used once."""

    def take(self, index: int, guard: Guard, replica: Replica) -> None:
        """One that the run begins with: from here on its death is not the run's, where the policy says so."""
        member = self._members[index] = Member(self, index, guard, replica)
        self.guards.append(guard)
        guard.arm(*member.call)

    @property
    def size(self) -> int:
        """Replicas that serve, or are about to."""
        return len(self._members)

    async def scale(self, wanted: int) -> None:
        """Until there are `wanted`, within 1 and `most`; fewer where one cannot start, which is told."""
        wanted = max(1, min(wanted, self.most))
        while self.size > wanted:
            await self._let_go(max(self._members))
        while self.size < wanted and await self._bring_in(min(set(range(self.most)) - set(self._members))):
            pass

    async def follow(self, wish: Path) -> None:
        """Does what the file `wish` asks for, whenever it is written; until it is cancelled."""
        done = 0
        while True:
            if (written := await asyncio.to_thread(_written, wish)) != done:
                done = written
                wanted = await asyncio.to_thread(_wanted, wish)
                if wanted is None:
                    self._note(f'{wish} is not understood; it is to hold {{"generators": a number}}')
                elif wanted != self.size:
                    self._note(f"{wanted} generators are wanted, there are {self.size}")
                    await self.scale(wanted)
            await asyncio.sleep(_LOOK_S)

    async def _bring_in(self, index: int) -> bool:
        member = self._members[index] = Member(self, index, Guard(self._policy, self._note))
        member.guard.life = self._lives.get(index, 0)
        member.guard.enlist(*member.call)
        if why_not := await self._meshes.begin(member.guard):
            self._forget(index)
            self._note(f"{member.name} could not start, the run goes on without it: {first_line(why_not)}")
            return False
        self.guards.append(member.guard)
        self._note(f"{member.name} serves; there are {self.size} generators")
        return True

    async def _let_go(self, index: int) -> None:
        member = self._members[index]
        while (replica := member.replica) is not None and replica in self.generators.replicas:
            self._note(f"{member.name} leaves once its {replica.running} requests have ended")
            await self.generators.retire(replica)

        async def goodbye() -> None:
            if replica is not None:
                await self.sync.depart(replica)
                await within(_ENDS_S, f"{member.name} to end", replica.ask(replica.mesh.shutdown.call_one()))

        await self._meshes.release(member.guard, goodbye)
        self._forget(index)
        self._note(f"{member.name} has left; there are {self.size} generators")

    def _forget(self, index: int) -> None:
        member = self._members.pop(index)
        self._lives[index] = member.guard.life + 1
        self.generators.give_up(member.name)


def _written(wish: Path) -> int:
    with contextlib.suppress(OSError):
        return wish.stat().st_mtime_ns
    return 0


def _wanted(wish: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        wanted = json.loads(wish.read_text()).get("generators")
        return wanted if isinstance(wanted, int) else None
    return None
