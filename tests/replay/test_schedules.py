"""Every schedule of reserve, add, fail, sample, release and straggler drops: no deadlock, never above the bound.

Small cases are explored exhaustively, and against every policy at once: wherever a batch may be taken, each set of
groups is tried as the preferred one. Longer schedules come from hypothesis, with jumps of the version, producers
that lie about versions, and saves. All run the real ReplayBuffer beside a model that keeps its own books.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.buffer import ReplayBuffer
from replay.policies import POLICIES, View
from replay.staleness import Admission, Ticket
from replay.storage import Record


def record(oldest: int, *, newest: int | None = None, degenerate: bool = False, magnitude: float = 0.0) -> Record:
    rewards = [1.0, 1.0] if degenerate else [0.0, 1.0]
    newest = oldest if newest is None else newest
    return Record({}, [oldest, newest], newest, 4, rewards, degenerate, [4, 4], magnitude, 0)


def newest_first(view: View) -> Iterable[int]:
    """Against the order, running ones included."""
    return reversed(list(view.groups))


def running_first(view: View) -> Iterable[int]:
    """Waits wherever it can."""
    return [seq for seq, slot in view.groups.items() if slot.record is None]


def fickle(view: View, rng: random.Random = random.Random(0)) -> Iterable[int]:  # noqa: B008
    """Another order whenever it is asked."""
    return rng.sample(list(view.groups), len(view.groups))


def silent(_view: View) -> Iterable[int]:
    """Names nothing."""
    return []


def preferring(wanted: Iterable[int], view: View) -> Iterable[int]:
    """The groups of `wanted` first."""
    return [seq for seq in wanted if seq in view.groups]


Options = dict[str, Any]
STRICT: Options = {"policy": POLICIES["strict"]}
WINDOWS = (0.0, 0.5, 1.0)
CHOICES: dict[str, Options] = {
    **{name: {"policy": policy} for name, policy in POLICIES.items()},
    **{policy.__name__: {"policy": policy} for policy in (newest_first, running_first, fickle, silent)},
    "uniform, two uses": {"policy": POLICIES["uniform"], "max_uses": 2},
    "fifo, three uses": {"policy": POLICIES["fifo"], "max_uses": 3},
    "newest_first, two uses": {"policy": newest_first, "max_uses": 2},
}


@dataclass
class Book:
    """What the model knows of a group that holds a slot."""

    ticket: Ticket
    left_free: int
    """Slots that its reservation left free."""
    oldest: int | None = None
    """None while it runs."""
    passed_by: int = 0
    """Places of batches that went to groups reserved after it, or trained before."""

    @property
    def version(self) -> int:
        return self.ticket.version if self.oldest is None else self.oldest


@dataclass
class World:
    """The buffer under test, and the model."""

    max_staleness: int
    groups_per_step: int
    window: float = 0.0
    options: Options = field(default_factory=dict)
    buffer: ReplayBuffer = field(init=False)
    released: int = 0
    version: int = 0
    told: int = 0
    """The trainer's version as far as the buffer was told."""
    live: dict[int, Book] = field(default_factory=dict)
    spent: dict[int, Record] = field(default_factory=dict)
    uses: Counter[int] = field(default_factory=Counter)
    late: list[Ticket] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    accepted: int = 0
    lied: bool = False
    jumped: bool = False
    mixed: bool = False
    """Not all batches came from one policy."""

    def __post_init__(self) -> None:
        self.buffer = self.new_buffer()

    def new_buffer(self) -> ReplayBuffer:
        return ReplayBuffer(
            Admission(self.max_staleness, self.groups_per_step, window=self.window),
            degenerate="drop",
            max_degenerate_in_a_row=10**6,
            clock=lambda: 0.0,
            **self.options,
        )

    def clone(self, **options: Any) -> World:
        """The same state with a buffer of its own, restored from what this one saves."""
        twin = World(self.max_staleness, self.groups_per_step, self.window, options or self.options)
        twin.buffer.load_state_dict(self.buffer.state_dict())
        for name in ("released", "version", "told", "accepted", "lied", "jumped"):
            setattr(twin, name, getattr(self, name))
        twin.mixed = self.mixed or bool(options)
        twin.live = {seq: replace(book) for seq, book in self.live.items()}
        twin.spent, twin.uses, twin.late = dict(self.spent), Counter(self.uses), list(self.late)
        return twin

    def resume(self) -> None:
        state = pickle.loads(pickle.dumps(self.buffer.state_dict()))
        self.buffer = self.new_buffer()
        self.buffer.load_state_dict(state)

    @property
    def slots(self) -> int:
        withheld = int(self.window * self.max_staleness * self.groups_per_step)  # exact, by halves
        return (self.max_staleness + 1) * self.groups_per_step - withheld

    @property
    def running(self) -> list[Ticket]:
        return [book.ticket for book in self.live.values() if book.oldest is None]

    @property
    def fickle(self) -> bool:
        """The policy changes its mind between two questions, so that only luck ends a wait."""
        return self.options.get("policy") is fickle

    @property
    def honest(self) -> bool:
        """Nobody broke the rules on which the bound rests."""
        return not self.lied and not self.jumped

    def reserve(self) -> bool:
        ticket = self.buffer.reserve()
        if ticket is not None:
            assert ticket.version == self.released
            unreleased = (self.told - self.released) * self.groups_per_step
            self.live[ticket.seq] = Book(ticket, self.slots - unreleased - len(self.live) - 1)
            assert self.live[ticket.seq].left_free >= 0, "more groups were admitted than there are slots"
        return ticket is not None

    def add(self, ticket: Ticket, oldest: int, *, degenerate: bool = False) -> None:
        self.lied |= oldest < ticket.version
        group = record(oldest, newest=max(oldest, ticket.version), degenerate=degenerate, magnitude=ticket.seq * 7 % 5)
        self.buffer.add(ticket, group)
        if degenerate or oldest < self.told - self.max_staleness:
            del self.live[ticket.seq]
        else:
            self.live[ticket.seq].oldest = oldest
            self.accepted += 1

    def fail(self, ticket: Ticket) -> None:
        self.buffer.fail(ticket)
        del self.live[ticket.seq]

    def straggle(self) -> int:
        """Drops the stragglers of the next batch: only running ones, as few as complete it."""
        before = {ticket.seq: ticket for ticket in self.buffer.running}
        dropped = self.buffer.drop_stragglers(0.0)
        gone = before.keys() - {ticket.seq for ticket in self.buffer.running}
        assert len(gone) == dropped
        for seq in gone:
            self.late.append(self.live.pop(seq).ticket)
        return dropped

    def add_late(self) -> None:
        wasted = self.buffer.counts.tokens_wasted
        self.buffer.add(self.late.pop(0), record(self.version))
        assert self.buffer.counts.tokens_wasted == wasted + 4

    def release(self, version: int) -> None:
        self.buffer.release(version)
        self.released = max(self.released, version)
        self.told = max(self.told, version)

    def jump(self) -> None:
        self.version += 1
        self.jumped = True

    def sample(self) -> bool:
        self.told = self.version
        self.forget_expired()
        head = list(self.live)[: self.groups_per_step]
        choice = self.buffer.sample(self.version)
        if choice is None:
            return False
        assert len(choice.seqs) == len(set(choice.seqs)) == self.groups_per_step
        if self.options == STRICT and self.honest and not self.mixed:
            assert choice.seqs == head, "not the oldest reservations, in order"
        for seq, group in zip(choice.seqs, choice.records, strict=True):
            assert self.version - min(group.oldest) <= self.max_staleness, "a group above the bound was trained"
            self.uses[seq] += 1
            if (book := self.live.pop(seq, None)) is not None:
                assert book.oldest is not None, "a group that runs was trained"
                if self.honest:
                    ahead = self.slots - 1 - book.left_free
                    assert self.version - book.version <= (ahead + book.passed_by) // self.groups_per_step
            else:
                assert seq in self.spent, "a batch holds a group that is neither live nor trained before"
            self.spent[seq] = group
        if self.options.get("policy") is POLICIES["fifo"] and not self.mixed and self.options.get("max_uses", 1) == 1:
            for seq, book in self.live.items():
                for other, group in zip(choice.seqs, choice.records, strict=True):
                    in_order = book.oldest is None or other < seq or min(group.oldest) < book.oldest
                    assert in_order, "fifo passed over a group that was complete"
        for seq, book in self.live.items():
            book.passed_by += sum(other > seq or self.uses[other] > 1 for other in choice.seqs)
        self.batches.append(choice.seqs)
        assert max(self.uses[seq] for seq in choice.seqs) <= self.options.get("max_uses", 1)
        self.version = self.told = self.version + 1
        return True

    def forget_expired(self) -> None:
        for seq, book in list(self.live.items()):
            if book.oldest is not None and book.oldest < self.version - self.max_staleness:
                assert not self.honest, "a group of an honest producer got too old in the queue"
                del self.live[seq]
                self.accepted -= 1

    def check(self) -> None:
        """Slots are conserved, both books agree, and F holds where nobody broke the rules."""
        admission, buffer = self.buffer.admission, self.buffer
        complete = len(self.live) - len(self.running)
        assert admission.released == self.released
        assert (buffer.num_running, buffer.num_queued) == (len(self.running), complete)
        assert buffer.running == self.running
        assert admission.live == len(self.live)
        assert admission.next_version == self.told
        if self.jumped:
            return
        if self.options.get("max_uses", 1) == 1:
            # Where no window is set, of S + 1 batches of slots.
            oracle = self.slots + self.released * self.groups_per_step
            assert admission.free == oracle - self.accepted - len(self.running)
        if self.honest:
            for deadline in range(self.version, self.version + self.max_staleness + 1):
                due = sum(book.version + self.max_staleness <= deadline for book in self.live.values())
                assert due <= (deadline - self.version + 1) * self.groups_per_step, "F is broken"

    def key(self) -> tuple[Any, ...]:
        """The state up to a shift of versions and the order of equals; which policy chooses is not part of it."""
        groups = sorted(
            (b.ticket.version - self.released, b.version - self.released, b.oldest is None) for b in self.live.values()
        )
        return (self.version - self.released, *groups)

    def drain(self, how: str) -> None:
        """All running producers finish, fail or vanish, new ones answer, all versions are released: batches come."""
        vanished = {ticket.seq for ticket in self.running} if how == "vanish" else set()
        for ticket in self.running if how != "vanish" else []:
            self.fail(ticket) if how == "fail" else self.add(ticket, ticket.version)
        for _ in range(self.max_staleness + 2):
            self.release(self.version)
            for _attempt in range(50):
                while self.reserve():
                    pass
                for ticket in self.running:
                    if ticket.seq not in vanished:
                        self.add(ticket, ticket.version)
                expired = self.buffer.counts.groups_expired
                if self.sample():
                    break
                dropped = self.straggle() + self.buffer.counts.groups_expired - expired
                assert dropped or self.fickle, "deadlock: every producer is done or gone, and no batch"
            else:
                pytest.fail("livelock: stragglers were dropped, and still no batch")
            self.check()


# --- every state of a small case


def successors(world: World) -> Iterable[World]:
    """Every step that loops, producers and any policy can take from here."""
    steps: list[Callable[[World], object]] = [World.reserve]
    steps += [partial(World.add, ticket=ticket, oldest=oldest) for ticket, oldest in distinct(world)]
    steps += [partial(World.fail, ticket=ticket) for ticket in {t.version: t for t in world.running}.values()]
    steps += [partial(World.release, version=v) for v in range(world.released + 1, world.version + 1)]
    for step in steps:
        after = world.clone()
        step(after)
        yield after
    for wanted in subsets(world):
        after = world.clone(policy=partial(preferring, wanted))
        if not after.sample():
            yield after.clone()
            before = after.clone(policy=after.options["policy"])
            if after.straggle() and after.clone(policy=after.options["policy"]).sample():
                assert_no_fewer_would_do(before, after.late)
            after.late.clear()
        yield after


def assert_no_fewer_would_do(world: World, dropped: list[Ticket]) -> None:
    """Without all of `dropped` there is a batch; with any of them left there is none."""
    for size in range(1, len(dropped)):
        for fewer in itertools.combinations(dropped, size):
            after = world.clone(policy=world.options["policy"])
            for ticket in fewer:
                after.fail(ticket)
            assert not after.sample(), "a group was dropped for nothing"


def fits_without_the_running(world: World) -> bool:
    """Whether B groups are complete, and the running ones have places in later batches, up to their deadlines."""
    running = [book.version + world.max_staleness for book in world.live.values() if book.oldest is None]
    return len(world.live) - len(running) >= world.groups_per_step and all(
        sum(deadline <= d for deadline in running) <= (d - world.version) * world.groups_per_step
        for d in range(world.version, world.version + world.max_staleness + 1)
    )


def distinct(world: World) -> set[tuple[Ticket, int]]:
    """Who may finish with which oldest version; one of each kind."""
    kinds = {ticket.version: ticket for ticket in world.running}
    return {(ticket, oldest) for ticket in kinds.values() for oldest in range(ticket.version, world.version + 1)}


def subsets(world: World) -> Iterable[list[int]]:
    """The sets of groups that a policy may prefer; one of each kind."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for chosen in itertools.combinations(world.live, min(len(world.live), world.groups_per_step)):
        books = [world.live[seq] for seq in chosen]
        kinds.setdefault(tuple(sorted((b.version, b.oldest is None) for b in books)), list(chosen))
    return kinds.values()


@pytest.mark.parametrize(
    ("max_staleness", "groups_per_step"),
    [
        *[(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1)],
        pytest.param(2, 2, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("window", WINDOWS)
def test_in_every_reachable_state_a_batch_comes_and_none_is_above_the_bound(
    max_staleness: int, groups_per_step: int, window: float
) -> None:
    start = World(max_staleness, groups_per_step, window)
    seen = {start.key(): start}
    todo = deque([start])
    stalest = 0
    while todo:
        world = todo.popleft()
        for after in successors(world):
            after.check()
            stalest = max(stalest, after.version - min([b.version for b in after.live.values()], default=after.version))
            if after.key() not in seen:
                seen[after.key()] = after
                todo.append(after)
    reached = max_staleness if start.slots > groups_per_step else 0  # slots for one batch: all groups are in the next
    assert stalest == reached, "the exploration never came near the bound"
    for world in seen.values():
        fits = fits_without_the_running(world)
        assert world.clone(policy=POLICIES["fifo"]).sample() == fits, "training stalled for nothing, or F is lost"
    ends = itertools.cycle(itertools.product(CHOICES.values(), ("finish", "fail", "vanish")))
    for world, (options, how) in zip(seen.values(), ends, strict=False):
        world.clone(**options).drain(how)


# --- longer schedules

USUAL = ["reserve"] * 2 + ["add"] * 3 + ["sample"] * 2 + ["release"] * 2 + ["fail", "degenerate", "straggle", "late"]
STEPS = st.tuples(st.sampled_from(USUAL), st.integers(0, 11))
ROUGH = st.tuples(st.sampled_from(["jump", "older", "reserve", "add", "sample", "release"]), st.integers(0, 11))
SIZES = st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from(WINDOWS))


def apply(world: World, name: str, choice: int) -> None:
    running = world.running
    ticket = running[choice % len(running)] if running else None
    match name:
        case "reserve":
            world.reserve()
        case "sample":
            world.sample()
        case "jump":
            world.jump()
        case "release":
            world.release(world.released + choice % (world.version - world.released + 1))
        case "straggle":
            world.straggle()
        case "late" if world.late:
            world.add_late()
        case "add" if ticket:
            world.add(ticket, min(ticket.version + choice % 3, max(world.version, ticket.version)))
        case "older" if ticket:
            world.add(ticket, max(0, ticket.version - choice))
        case "degenerate" if ticket:
            world.add(ticket, ticket.version, degenerate=True)
        case "fail" if ticket:
            world.fail(ticket)
    world.check()


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    sizes=SIZES,
    schedule=st.lists(STEPS, min_size=30, max_size=90),
    saves=st.sets(st.integers(0, 89), max_size=3),
    how=st.sampled_from(["finish", "fail", "vanish"]),
)
def test_any_schedule_keeps_the_bound_and_the_slots_and_ends(
    options: Options, sizes: tuple[int, int, float], schedule: list[tuple[str, int]], saves: set[int], how: str
) -> None:
    world = World(*sizes, options)
    for number, (name, choice) in enumerate(schedule):
        apply(world, name, choice)
        if number in saves:
            world.resume()
            world.check()
    assert world.honest
    world.drain(how)


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    sizes=SIZES,
    schedule=st.lists(st.one_of(STEPS, ROUGH), min_size=30, max_size=90),
    how=st.sampled_from(["finish", "fail", "vanish"]),
)
def test_a_trainer_that_jumps_and_producers_that_lie_cost_groups_but_never_the_bound(
    options: Options, sizes: tuple[int, int, float], schedule: list[tuple[str, int]], how: str
) -> None:
    world = World(*sizes, options)
    for name, choice in schedule:
        apply(world, name, choice)
    world.drain(how)


PURE = {name: options for name, options in CHOICES.items() if options["policy"] is not fickle}


@pytest.mark.parametrize("options", PURE.values(), ids=PURE)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    sizes=SIZES,
    schedule=st.lists(st.one_of(STEPS, ROUGH), min_size=30, max_size=90),
    save_at=st.integers(0, 60),
    asked_again=st.booleans(),
)
def test_a_saved_buffer_goes_on_with_the_same_batches(
    options: Options, sizes: tuple[int, int, float], schedule: list[tuple[str, int]], save_at: int, asked_again: bool
) -> None:
    def batches(saved: bool) -> list[list[int]]:
        world = World(*sizes, options)
        for number, (name, choice) in enumerate(schedule):
            if saved and number == save_at:
                world.resume()
            if saved and asked_again and name == "sample":
                world.buffer.describe_missing()
            apply(world, name, choice)
        world.drain("vanish")
        return world.batches

    assert batches(saved=True) == batches(saved=False)
