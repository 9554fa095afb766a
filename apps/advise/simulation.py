"""A run with environments in virtual time: what asynchrony would gain, before anybody builds it. No model, no waiting.

    a slot -> G episodes, each: a place in the environments -> turns of (a place in the generator, decode) and (latency)
           -> group -> batch of B groups -> step -> sync -> slots

Admission and batches are the replay's own (`replay/staleness.py`), so the bound holds as it does in a run: tokens count
from the version that the generators held when their group began. `barrier` is what simple asynchronous code does
instead: whole batches one after the other, an environment's turn inside the generation call, one batch ahead.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from tensordict import TensorDict

from replay.buffer import ReplayBuffer
from replay.staleness import Admission, Ticket
from replay.storage import Record

Draw = Callable[[random.Random], float]
"""Seconds of one turn."""
_NOTHING = TensorDict({}, batch_size=[])


@dataclass(frozen=True)
class Scene:
    """What stays the same whatever the bound; times in seconds."""

    turns: int | Callable[[random.Random], int]
    """Of an episode."""
    latency_s: Draw
    """Of an environment's turn."""
    decode_s: Draw
    """Of the policy's turn, with a place in the generator."""
    step_s: float
    """Of one optimizer step."""
    sync_s: float = 0.0
    """From the end of a step until the generators hold its weights."""
    group_size: int = 8
    groups_per_step: int = 8
    environments: int = 64
    """Episodes under way at once."""
    places: int = 64
    """Turns decoded at once."""
    reset_s: Draw = lambda rng: 0.0
    """Of an environment's beginning."""


@dataclass(frozen=True)
class Outcome:
    """Of the steps behind the warm-up."""

    steps_per_s: float
    trainer_busy: float
    """Share of the time in which a step runs."""
    generator_busy: float
    """Share of the generator's places that decode."""
    environments_busy: float
    """Share of the environments' places that hold an episode; each counts when it ends."""
    staleness_mean: float
    staleness_max: int


class _Places:
    """So many at once, the others in order of their coming."""

    def __init__(self, count: int) -> None:
        self.free, self.count = count, count
        self.waiting: deque[Iterator[object]] = deque()


class _World:
    """Virtual time. A process is a generator that yields seconds to wait, or places to take one of."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Iterator[object]]] = []
        self._order = itertools.count()

    def start(self, process: Iterator[object], after_s: float = 0.0) -> None:
        heapq.heappush(self._events, (self.now + after_s, next(self._order), process))

    def give_back(self, places: _Places) -> None:
        if places.waiting:
            self.start(places.waiting.popleft())
        else:
            places.free += 1

    def run(self, done: Callable[[], bool]) -> None:
        """Raises RuntimeError when nothing will ever happen again."""
        while not done():
            if not self._events:
                raise RuntimeError(f"deadlock after {self.now:.1f} virtual seconds")
            self.now, _, process = heapq.heappop(self._events)
            self._resume(process)

    def _resume(self, process: Iterator[object]) -> None:
        wanted = next(process, None)
        if isinstance(wanted, _Places):
            if wanted.free:
                wanted.free -= 1
                self.start(process)
            else:
                wanted.waiting.append(process)
        elif isinstance(wanted, float):
            self.start(process, wanted)


@dataclass
class _Run:
    """One simulation."""

    scene: Scene
    bound: int
    steps: int
    seed: int
    barrier: bool = False
    world: _World = field(default_factory=_World)
    version: int = 0
    training: bool = False
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("step", "decode", "episode"), 0.0))
    staleness: list[list[int]] = field(default_factory=list)
    """Of each batch, by group."""
    marks: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """Time and time spent, at the end of each step."""

    def __post_init__(self) -> None:
        scene = self.scene
        self.environments, self.places, self.trainer = (
            _Places(count) for count in (scene.environments, scene.places, 1)
        )
        admission = Admission(self.bound, scene.groups_per_step)
        self.queue = ReplayBuffer(admission, clock=lambda: self.world.now)

    def run(self, warm_up: int) -> Outcome:
        if self.barrier:
            self.world.start(self._batches())
        else:
            self._admit()
        self.world.run(lambda: self.version >= self.steps)
        (begin, spent), (end, total) = self.marks[warm_up - 1], self.marks[-1]
        wall = end - begin
        busy = {name: (total[name] - spent[name]) / wall for name in total}
        warm = [staleness for batch in self.staleness[warm_up:] for staleness in batch]
        return Outcome(
            (self.steps - warm_up) / wall,
            busy["step"],
            busy["decode"] / self.scene.places,
            busy["episode"] / self.scene.environments,
            sum(warm) / len(warm),
            max(warm),
        )

    def _admit(self) -> None:
        while (ticket := self.queue.reserve()) is not None:
            left = [self.scene.group_size]
            for place in range(self.scene.group_size):
                self.world.start(self._episode(ticket.seq, place, partial(self._ended, ticket, left)))

    def _episode(self, group: int, place: int, ended: Callable[[], None]) -> Iterator[object]:
        """Draws the same times under every bound, wherever it runs."""
        rng = random.Random(f"{self.seed}/{group}/{place}")
        yield self.environments
        begin, turns = self.world.now, self.scene.turns
        yield self.scene.reset_s(rng)
        for _ in range(turns if isinstance(turns, int) else turns(rng)):
            decode, latency = self.scene.decode_s(rng), self.scene.latency_s(rng)
            yield self.places
            yield decode
            self.spent["decode"] += decode
            if self.barrier:
                yield latency
                self.world.give_back(self.places)
            else:
                self.world.give_back(self.places)
                yield latency
        self.spent["episode"] += self.world.now - begin
        self.world.give_back(self.environments)
        ended()

    def _ended(self, ticket: Ticket, left: list[int]) -> None:
        left[0] -= 1
        if left[0] == 0:
            record = Record(_NOTHING, [ticket.version], ticket.version, 1, [0.0], False, [1], self.world.now, 0)
            self.queue.add(ticket, record)
            self._train()

    def _train(self) -> None:
        if not self.training and (choice := self.queue.sample(self.version)) is not None:
            self.training = True
            self.staleness.append([self.version - record.oldest[0] for record in choice.records])
            self.world.start(self._step())

    def _step(self) -> Iterator[object]:
        yield self.scene.step_s
        self.spent["step"] += self.scene.step_s
        self.training = False
        self.version += 1
        self.marks.append((self.world.now, dict(self.spent)))
        self.world.start(self._sync(self.version))
        if self.barrier:
            self.world.give_back(self.trainer)
        else:
            self._train()

    def _sync(self, version: int) -> Iterator[object]:
        yield self.scene.sync_s
        if not self.barrier:
            self.queue.release(version)
            self._admit()

    def _batches(self) -> Iterator[object]:
        """Whole batches one after the other; a step runs beside the next one."""
        for batch in itertools.count():
            left = [self.scene.groups_per_step * self.scene.group_size]
            done = _Places(0)

            def ended(left: list[int] = left, done: _Places = done) -> None:
                left[0] -= 1
                if left[0] == 0:
                    self.world.give_back(done)

            for number in range(left[0]):
                group, place = divmod(number, self.scene.group_size)
                self.world.start(self._episode(batch * self.scene.groups_per_step + group, place, ended))
            yield done
            yield self.trainer
            self.staleness.append([min(1, self.version)])
            self.world.start(self._step())


def simulate(
    scene: Scene, bound: int, *, steps: int = 120, warm_up: int = 20, seed: int = 0, barrier: bool = False
) -> Outcome:
    """`steps` steps of `scene`; with `barrier` whole batches one after the other, one of them ahead."""
    return _Run(scene, bound, steps, seed, barrier).run(warm_up)
