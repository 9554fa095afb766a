"""The order in which groups are preferred, and that a configuration may name one of its own."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from forge.errors import ConfigError
from forge.registry import lookup
from replay.buffer import ReplayBuffer
from replay.policies import POLICIES, Slot, View, advantage, fifo, staleness, strict, uniform
from replay.staleness import Admission, Ticket
from replay.storage import Record

RUNNING = None


def complete(version: int = 0, magnitude: float = 0.0) -> Record:
    return Record({}, [version], version, 4, [0.0], False, [5], magnitude, 0)


def view(*records: Record | None, seed: int = 0, at: int = 0, **slot: int) -> View:
    """Groups of ticket version 0 in this order, for batches of two and a bound of 2."""
    groups = {}
    for seq, record in enumerate(records):
        version = 0 if record is None else record.oldest[0]
        groups[seq] = Slot(Ticket(seq, 0), 0.0, version, record, **slot)
    return View(groups, at, 2, 2, seed)


def test_fifo_takes_complete_groups_in_the_order_of_reservation() -> None:
    assert list(fifo(view(RUNNING, complete(), complete(), RUNNING, complete(), complete()))) == [1, 2, 4, 5]


def test_strict_takes_the_order_of_reservation_and_waits() -> None:
    assert list(strict(view(RUNNING, complete(), complete(), RUNNING, complete()))) == [0, 1, 2, 3, 4]


def test_advantage_takes_the_largest_magnitude_first_and_equals_in_order() -> None:
    groups = [complete(magnitude=m) for m in (0.5, 2.0, 0.0, 2.0)]
    assert advantage(view(*groups, RUNNING)) == [1, 3, 0, 2]


def test_staleness_takes_the_oldest_tokens_first_and_equals_in_order() -> None:
    assert staleness(view(RUNNING, *(complete(version=v) for v in (3, 1, 2, 1)), at=3)) == [2, 4, 3, 1]


def test_uniform_draws_every_order_and_the_same_one_for_the_same_seed_and_version() -> None:
    def order(seed: int, at: int) -> tuple[int, ...]:
        return tuple(uniform(view(*[complete()] * 3, RUNNING, seed=seed, at=at)))

    seen = Counter(order(seed, at) for seed in range(20) for at in range(30))
    assert set(seen) == set(itertools.permutations(range(3)))
    assert min(seen.values()) > 60, "600 draws of 6 orders"
    assert order(7, 8) == order(7, 8)
    assert [order(7, at) for at in range(20)] != [order(8, at) for at in range(20)]


def test_a_group_that_is_complete_earlier_does_not_change_the_draws_of_the_others() -> None:
    late = uniform(view(RUNNING, complete(), complete(), complete()))
    assert [seq for seq in uniform(view(*[complete()] * 4)) if seq != 0] == late


def longest_wait_last(view: View) -> list[int]:
    """What a user may write."""
    return sorted(view.groups, reverse=True)


def test_a_configuration_may_name_a_policy_of_its_own() -> None:
    assert lookup("uniform", POLICIES, "replay.policy") is uniform
    assert lookup("replay.policies:staleness", POLICIES, "replay.policy") is staleness
    with pytest.raises(ConfigError, match=r"replay.policy is 'lifo', .*advantage, fifo, staleness, strict, uniform"):
        lookup("lifo", POLICIES, "replay.policy")


def test_a_policy_of_ones_own_decides_the_order_and_not_the_bound() -> None:
    buffer = ReplayBuffer(Admission(1, 2), policy=longest_wait_last)
    batches = []
    for version in range(6):
        for ticket in iter(buffer.reserve, None):
            buffer.add(ticket, complete(ticket.version))
        choice = buffer.sample(version)
        assert choice is not None
        assert all(version - record.oldest[0] <= 1 for record in choice.records)
        batches.append(choice.seqs)
        buffer.release(version + 1)
    assert batches == [[2, 3], [0, 1], [4, 5], [6, 7], [8, 9], [10, 11]], "newest first, until the others were due"


def test_a_policy_that_names_a_group_that_is_not_there_is_an_error() -> None:
    buffer = ReplayBuffer(Admission(0, 1), policy=lambda _: [17])
    assert buffer.reserve() is not None
    with pytest.raises(ConfigError, match=r"replay.policy named group 17"):
        buffer.sample(0)
