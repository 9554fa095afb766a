"""Every schedule of reserve, add, fail, sample and release: no deadlock, never above the bound.

Small cases are explored exhaustively, larger ones by hypothesis. Both run the real ReplayBuffer beside
a model of a few lines that keeps its own books.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replay.buffer import ReplayBuffer
from replay.staleness import Admission, Ticket
from replay.storage import Record

NOTHING = TensorDict({}, batch_size=[])
GRID = list(itertools.product(range(4), range(1, 4)))


def record(oldest: int, *, newest: int | None = None, degenerate: bool = False) -> Record:
    rewards = [1.0, 1.0] if degenerate else [0.0, 1.0]
    newest = oldest if newest is None else newest
    return Record(NOTHING, [oldest, newest], newest, 4, rewards, degenerate, [4, 4], 0.0, 0)


@dataclass
class World:
    """The buffer under test, and the model: which tickets run, which records are queued, what was trained."""

    max_staleness: int
    groups_per_step: int
    buffer: ReplayBuffer = field(init=False)
    released: int = 0
    version: int = 0
    running: list[Ticket] = field(default_factory=list)
    queued: dict[int, Record] = field(default_factory=dict)
    accepted: int = 0
    lies: bool = False

    def __post_init__(self) -> None:
        self.buffer = ReplayBuffer(
            Admission(self.max_staleness, self.groups_per_step),
            degenerate="drop",
            max_degenerate_in_a_row=10**6,
            window=0.0,
        )

    @property
    def oracle(self) -> int:
        """Free slots by the counter of other systems."""
        return (self.max_staleness + self.released + 1) * self.groups_per_step - self.accepted - len(self.running)

    def reserve(self) -> bool:
        ticket = self.buffer.reserve()
        assert (ticket is not None) == (self.oracle > 0)
        if ticket is not None:
            assert ticket.version == self.released
            self.running.append(ticket)
        return ticket is not None

    def add(self, index: int, *, degenerate: bool = False, older_by: int = 0) -> None:
        ticket = self.running.pop(index)
        group = record(max(0, ticket.version - older_by), newest=ticket.version, degenerate=degenerate)
        self.buffer.add(ticket, group)
        if not degenerate and group.oldest[0] >= self.version - self.max_staleness:
            self.queued[ticket.seq] = group
            self.accepted += 1
        self.lies |= older_by > 0

    def fail(self, index: int) -> None:
        self.buffer.fail(self.running.pop(index))

    def release(self, version: int) -> None:
        self.buffer.release(version)
        self.released = max(self.released, version)

    def sample(self) -> bool:
        for seq, group in list(self.queued.items()):
            if group.oldest[0] < self.version - self.max_staleness:
                assert self.lies, "a group of an honest producer got too old in the queue"
                del self.queued[seq]
                self.accepted -= 1
        live = sorted([*self.queued, *(t.seq for t in self.running)])[: self.groups_per_step]
        expected = [self.queued[seq] for seq in live if seq in self.queued]
        batch = self.buffer.sample(self.version)
        if len(expected) < self.groups_per_step:
            assert batch is None
            return False
        assert batch is not None
        assert [id(r) for r in batch.records] == [id(r) for r in expected], "not the oldest reservations, in order"
        assert all(self.version - min(r.oldest) <= self.max_staleness for r in batch.records)
        for seq in live:
            del self.queued[seq]
        self.version += 1
        return True

    def check(self) -> None:
        """Slots are conserved, and both books agree."""
        admission = self.buffer.admission
        assert (admission.released, admission.next_version) == (self.released, self.version)
        assert (self.buffer.num_running, self.buffer.num_queued) == (len(self.running), len(self.queued))
        assert admission.free + admission.live + admission.unreleased == admission.slots
        assert admission.live == len(self.running) + len(self.queued)
        assert admission.free == self.oracle

    def key(self) -> tuple[object, ...]:
        """The state, up to a shift of versions and sequence numbers."""
        groups = [(t.seq, t.version - self.released, False) for t in self.running]
        groups += [(seq, r.oldest[0] - self.released, True) for seq, r in self.queued.items()]
        return (self.version - self.released, *((age, done) for _, age, done in sorted(groups)))

    def drain(self, *, fail: bool) -> None:
        """All producers finish and all versions are released: a batch must come."""
        while self.running:
            self.fail(0) if fail else self.add(0)
        self.release(self.version)
        for _ in range(3):
            while self.reserve():
                pass
            while self.running:
                self.add(len(self.running) - 1)
            assert self.sample(), "deadlock: every producer is done, every version released, and no batch"
            self.release(self.version)
            self.check()


Action = tuple[str, int]


def actions_of(world: World) -> list[Action]:
    at = range(len(world.running))
    versions = range(world.released + 1, world.version + 1)
    return [
        ("reserve", 0),
        ("sample", 0),
        *(("add", i) for i in at),
        *(("fail", i) for i in at),
        *(("release", version - world.released) for version in versions),
    ]


def apply(world: World, action: Action) -> None:
    name, argument = action
    match name:
        case "reserve":
            world.reserve()
        case "sample":
            world.sample()
        case "add":
            world.add(argument)
        case "fail":
            world.fail(argument)
        case "release":
            world.release(world.released + argument)
    world.check()


def replayed(max_staleness: int, groups_per_step: int, path: tuple[Action, ...]) -> World:
    world = World(max_staleness, groups_per_step)
    for action in path:
        apply(world, action)
    return world


@pytest.mark.parametrize(
    "max_staleness, groups_per_step", [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
)
def test_in_every_reachable_state_a_batch_comes_and_none_is_above_the_bound(
    max_staleness: int, groups_per_step: int
) -> None:
    seen: dict[tuple[object, ...], tuple[Action, ...]] = {World(max_staleness, groups_per_step).key(): ()}
    todo = deque(seen.values())
    stalest = 0
    while todo:
        path = todo.popleft()
        for action in actions_of(replayed(max_staleness, groups_per_step, path)):
            world = replayed(max_staleness, groups_per_step, (*path, action))
            if world.key() in seen:
                continue
            seen[world.key()] = (*path, action)
            todo.append(seen[world.key()])
            stalest = max(stalest, world.version - min([t.version for t in world.running], default=world.version))
    for path in seen.values():
        for fail in (False, True):
            replayed(max_staleness, groups_per_step, path).drain(fail=fail)
    assert stalest == max_staleness, "the exploration never came near the bound"


STEPS = st.tuples(
    st.sampled_from(["reserve", "reserve", "add", "add", "degenerate", "older", "fail", "sample", "release"]),
    st.integers(0, 11),
)


@pytest.mark.parametrize("max_staleness, groups_per_step", GRID)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(schedule=st.lists(STEPS, min_size=30, max_size=90), fail=st.booleans())
def test_any_schedule_keeps_the_bound_the_order_and_the_slots(
    max_staleness: int, groups_per_step: int, schedule: list[Action], fail: bool
) -> None:
    world = World(max_staleness, groups_per_step)
    for name, choice in schedule:
        if name == "reserve":
            world.reserve()
        elif name == "sample":
            world.sample()
        elif name == "release":
            world.release(world.released + choice % (world.version - world.released + 1))
        elif world.running:
            index = choice % len(world.running)
            match name:
                case "add":
                    world.add(index)
                case "degenerate":
                    world.add(index, degenerate=True)
                case "older":
                    world.add(index, older_by=choice)
                case "fail":
                    world.fail(index)
        world.check()
    world.drain(fail=fail)
