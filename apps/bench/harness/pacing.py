"""A run in virtual time: generation, trainer and weight sync as events, around a queue of groups. No model.

    idle workers --reserve--> queue --latency--> add --> sample --step--> publish --sync--> release

Workers are the groups that the engine generates at once; an idle one starts the next group as soon as the queue
admits it. A group's tokens count from the version that the generators held at its start. The i-th group that is
started takes `latencies[i]` under every queue.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tensordict import TensorDict

from replay.buffer import ReplayBuffer
from replay.policies import Policy, fifo, strict
from replay.staleness import Admission, Ticket
from replay.storage import Record

NOTHING = TensorDict({}, batch_size=[])
TOKENS_PER_S = 1000
"""A group's tokens for each second of its latency."""
LONGEST = 16
"""No group takes longer than so many times the mean: an engine has a token budget."""
SLOW_SHARE = 0.25
"""Groups among the longest quarter are slow, those among the shortest quick."""


class Queue(Protocol):
    """What stands between generation and the trainer."""

    def reserve(self) -> Ticket | None: ...

    def add(self, ticket: Ticket, record: Record) -> None: ...

    def batch(self, policy_version: int) -> list[int] | None: ...

    def release(self, version: int) -> None: ...

    def waiting(self) -> set[int]:
        """Complete groups that were neither trained nor dropped."""
        ...


class Paced(ReplayBuffer):
    """The project's own: admission by slots, less those of the window; groups chosen by policy and deadline."""

    def batch(self, policy_version: int) -> list[int] | None:
        """The numbers of the next batch, if it is complete."""
        choice = self.sample(policy_version)
        return None if choice is None else choice.seqs

    def waiting(self) -> set[int]:
        """See `Queue`."""
        return {slot["ticket"]["seq"] for slot in self.state_dict()["slots"] if slot["record"] is not None}


class Open:
    """Admits everything and trains in the order of completion. With a bound, what is too old is thrown away."""

    def __init__(self, groups_per_step: int, max_staleness: int | None) -> None:
        self._count, self._bound = groups_per_step, max_staleness
        self._released = 0
        self._seqs = itertools.count()
        self._complete: dict[int, int] = {}

    def reserve(self) -> Ticket | None:
        """A ticket, always."""
        return Ticket(next(self._seqs), self._released)

    def add(self, ticket: Ticket, record: Record) -> None:
        """Queues the group."""
        self._complete[ticket.seq] = record.oldest[0]

    def batch(self, policy_version: int) -> list[int] | None:
        """The groups that were complete first, less those above the bound."""
        if self._bound is not None:
            oldest = policy_version - self._bound
            self._complete = {seq: version for seq, version in self._complete.items() if version >= oldest}
        if len(self._complete) < self._count:
            return None
        taken = list(itertools.islice(self._complete, self._count))
        for seq in taken:
            del self._complete[seq]
        return taken

    def release(self, version: int) -> None:
        """The generators hold `version`."""
        self._released = version

    def waiting(self) -> set[int]:
        """See `Queue`."""
        return set(self._complete)


def paced(policy: Policy, window: float) -> Callable[[int, int], Queue]:
    """A maker of queues for a bound and a batch size."""
    return lambda bound, count: Paced(Admission(bound, count, window=window), policy=policy, clock=lambda: 0.0)


STRICT, DROP, UNBOUNDED = "strict FIFO", "drop-stale", "unbounded"
WINDOWED = {window: f"windowed FIFO, w {window:g}" for window in (0.0, 0.25, 0.5)}
"""By window: the share of the bound that is kept for groups that run long."""
QUEUES: dict[str, Callable[[int, int], Queue]] = {
    STRICT: paced(strict, 0.0),
    **{name: paced(fifo, window) for window, name in WINDOWED.items()},
    DROP: lambda bound, count: Open(count, bound),
    UNBOUNDED: lambda _bound, count: Open(count, None),
}

LATENCIES: dict[str, Callable[[random.Random], float]] = {
    "uniform": lambda rng: rng.uniform(0.5, 1.5),
    "lognormal 0.5": lambda rng: rng.lognormvariate(0, 0.5),
    "lognormal 1.0": lambda rng: rng.lognormvariate(0, 1.0),
    "pareto 2.0": lambda rng: rng.paretovariate(2.0),
    "pareto 1.2": lambda rng: rng.paretovariate(1.2),
}
"""Shapes of latency from light to heavy tails, before scaling."""
MODERATE = ("uniform", "lognormal 0.5")


def draw_latencies(shape: str, count: int, mean_s: float, seed: int = 0) -> list[float]:
    """Latencies of `shape` with this mean, none above `LONGEST` times it."""
    rng = random.Random(f"{seed}/{shape}")
    drawn = [LATENCIES[shape](rng) for _ in range(count)]
    for _ in range(20):  # cutting the tail lowers the mean, and raising the mean moves the cut
        scale = mean_s * count / sum(drawn)
        drawn = [min(latency * scale, LONGEST * mean_s) for latency in drawn]
    return drawn


@dataclass(frozen=True)
class Plant:
    """What every queue is measured with; times in virtual seconds."""

    workers: int
    """Groups that are generated at once."""
    steps: int = 400
    warm_up: int = 20
    """Steps that are left out."""
    groups_per_step: int = 16
    step_s: float = 1.0
    sync_s: float = 0.25
    mean_latency_s: float = 0.8

    @property
    def supply(self) -> float:
        """Groups that generation can make while a step takes its batch, in batches."""
        return self.workers * self.step_s / (self.mean_latency_s * self.groups_per_step)


@dataclass
class Simulation:
    """One run."""

    plant: Plant
    queue: Queue
    latencies: Sequence[float]
    now: float = 0.0
    version: int = 0
    training: bool = False
    syncing: bool = False
    published: int = 0
    idle: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)
    trained: list[tuple[int, int]] = field(default_factory=list)
    """Number of each trained group, and the version that it was trained at."""
    warm_at: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def run(self) -> Simulation:
        """Until the last step. Raises RuntimeError when nothing will ever happen again."""
        self.idle = self.plant.workers
        while self.version < self.plant.steps:
            self._start_groups()
            self._start_step()
            if not self._events:
                raise RuntimeError(f"deadlock at version {self.version} after {self.now:.1f} virtual seconds")
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self

    def _after(self, delay_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), happen))

    def _start_groups(self) -> None:
        while self.idle and (ticket := self.queue.reserve()) is not None:
            self.idle -= 1
            self.tickets.append(ticket)
            self._after(self.latency(ticket.seq), partial(self._finish_group, ticket))

    def latency(self, seq: int) -> float:
        """Of the group with this number, which counts the groups in the order of their start."""
        return self.latencies[seq % len(self.latencies)]

    def _finish_group(self, ticket: Ticket) -> None:
        self.idle += 1
        self.complete.add(ticket.seq)
        tokens = int(self.latency(ticket.seq) * TOKENS_PER_S)
        version = ticket.version
        self.queue.add(ticket, Record(NOTHING, [version], version, tokens, [0.0], False, [tokens], 0.0, 0))

    def _start_step(self) -> None:
        if self.training or (batch := self.queue.batch(self.version)) is None:
            return
        self.training = True
        self.trained += [(seq, self.version) for seq in batch]
        self._after(self.plant.step_s, self._finish_step)

    def _finish_step(self) -> None:
        self.training = False
        self.version += 1
        if self.version == self.plant.warm_up:
            self.warm_at = self.now
        if not self.syncing:
            self._sync()

    def _sync(self) -> None:
        self.syncing, self.published = True, self.version
        self._after(self.plant.sync_s, self._finish_sync)

    def _finish_sync(self) -> None:
        self.syncing = False
        self.queue.release(self.published)
        if self.version > self.published:
            self._sync()


def figures(run: Simulation) -> dict[str, Any]:
    """Of the steps after the warm-up, and of all groups that were complete when the run ended.

    `discard_bias` is the drop rate of the slow groups over that of the quick ones, None where no quick one was
    dropped; `slow_share` the share of the slow ones among the trained groups over that among the started ones.
    """
    plant = run.plant
    warm = [version - run.tickets[seq].version for seq, version in run.trained if version >= plant.warm_up]
    steps, wall_s = plant.steps - plant.warm_up, run.now - run.warm_at
    trained = {seq for seq, _ in run.trained}
    dropped = run.complete - trained - run.queue.waiting()
    ended = trained | dropped
    ranked = sorted(run.latencies)
    quick_s, slow_s = ranked[int(SLOW_SHARE * len(ranked))], ranked[int((1 - SLOW_SHARE) * len(ranked))]
    slow = {seq for seq in ended if run.latency(seq) >= slow_s}
    quick = {seq for seq in ended if run.latency(seq) <= quick_s}
    quick_drops, slow_drops = len(dropped & quick) / max(1, len(quick)), len(dropped & slow) / max(1, len(slow))
    return {
        "steps_per_s": steps / wall_s,
        "busy_share": steps * plant.step_s / wall_s,
        "staleness_mean": sum(warm) / len(warm),
        "staleness_max": max(version - run.tickets[seq].version for seq, version in run.trained),
        "wasted_share": sum(map(run.latency, dropped)) / sum(map(run.latency, ended)),
        "quick_drops": quick_drops,
        "slow_drops": slow_drops,
        "discard_bias": slow_drops / quick_drops if quick_drops else None,
        "slow_share": _share(run, trained, slow_s) / _share(run, {ticket.seq for ticket in run.tickets}, slow_s),
    }


def _share(run: Simulation, seqs: Collection[int], slow_s: float) -> float:
    return sum(run.latency(seq) >= slow_s for seq in seqs) / len(seqs)
