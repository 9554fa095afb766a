"""Admission by slots, and which groups a batch must hold: the arithmetic of the bound."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from forge.errors import ConfigError, StalenessError
from replay.staleness import Admission, choose, needs, num_slots

GRID = list(itertools.product(range(4), range(1, 4)))
WINDOWS = (0.0, 0.25, 0.5, 1.0)


@pytest.mark.parametrize("max_staleness, groups_per_step", GRID)
def test_there_are_bound_plus_one_batches_of_slots(max_staleness: int, groups_per_step: int) -> None:
    admission = Admission(max_staleness, groups_per_step)
    tickets = list(iter(admission.reserve, None))
    assert [t.seq for t in tickets] == list(range((max_staleness + 1) * groups_per_step))
    assert admission.free == 0


@pytest.mark.parametrize(
    ("max_staleness", "groups_per_step", "window", "slots"),
    [
        (0, 3, 1.0, 3),
        (1, 1, 0.5, 2),
        (1, 1, 0.99, 2),
        (1, 1, 1.0, 1),
        (3, 1, 0.5, 3),
        (3, 2, 0.25, 7),
        (4, 16, 0.5, 48),
        (4, 16, 1.0, 16),
        (100, 1, 0.29, 72),  # 0.29 * 100 is 28.999999999999996
    ],
)
def test_a_window_withholds_its_share_of_the_bound_in_whole_groups(
    max_staleness: int, groups_per_step: int, window: float, slots: int
) -> None:
    assert num_slots(max_staleness, groups_per_step, window) == slots
    assert len(list(iter(Admission(max_staleness, groups_per_step, window=window).reserve, None))) == slots


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("max_staleness, groups_per_step", GRID)
def test_whatever_the_window_there_are_slots_for_a_batch(
    max_staleness: int, groups_per_step: int, window: float
) -> None:
    assert groups_per_step <= num_slots(max_staleness, groups_per_step, window)
    assert num_slots(max_staleness, groups_per_step, window) <= num_slots(max_staleness, groups_per_step)
    assert num_slots(max_staleness, groups_per_step, 1.0) == groups_per_step


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("max_staleness, groups_per_step", GRID)
def test_capacity_agrees_with_the_counter_of_accepted_and_running_groups(
    max_staleness: int, groups_per_step: int, window: float
) -> None:
    rng = random.Random(max_staleness * 10 + groups_per_step)
    admission = Admission(max_staleness, groups_per_step, window=window)
    withheld = int(window * max_staleness * groups_per_step)  # of none where no window is set; exact, by quarters
    accepted = running = queued = 0
    for _ in range(3000):
        match rng.choice([*["reserve", "add", "consume", "release"] * 3, "fail", "drop"]):
            case "reserve" if admission.reserve() is not None:
                running += 1
            case "add" if running:
                running, queued, accepted = running - 1, queued + 1, accepted + 1
            case "fail" if running:
                running -= 1
                admission.give_back()
            case "drop" if queued:
                queued, accepted = queued - 1, accepted - 1
                admission.give_back()
            case "consume" if queued >= groups_per_step:
                queued -= groups_per_step
                admission.consume(admission.next_version)
            case "release":
                admission.release(rng.randint(admission.released, admission.next_version))
        oracle = (max_staleness + admission.released + 1) * groups_per_step - accepted - running
        assert admission.free == oracle - withheld
        assert admission.live == running + queued
    assert admission.next_version > 50, "the schedule never got going"


def test_a_ticket_carries_the_version_that_every_replica_holds() -> None:
    admission = Admission(1, 1, start_version=5)
    first = admission.reserve()
    admission.consume(5)
    second = admission.reserve()
    admission.consume(6)
    assert admission.reserve() is None
    admission.release(6)
    third = admission.reserve()
    assert first is not None
    assert second is not None
    assert third is not None
    assert [first.version, second.version, third.version] == [5, 5, 6]


def test_a_release_of_an_older_version_changes_nothing() -> None:
    admission = Admission(0, 2)
    for _ in range(2):
        admission.reserve()
    admission.consume(0)
    admission.release(1)
    admission.release(0)
    assert (admission.released, admission.free) == (1, 2)


def test_a_trainer_that_jumped_ahead_admits_nothing_until_its_weights_are_released() -> None:
    admission = Admission(1, 2)
    admission.advance(5)
    assert admission.reserve() is None
    admission.release(3)
    assert admission.reserve() is None
    admission.release(5)
    assert admission.free == 4


def test_a_policy_version_that_goes_back_is_an_error() -> None:
    admission = Admission(1, 1)
    admission.reserve()
    admission.consume(3)
    with pytest.raises(StalenessError, match="policy_version 3 is behind 4"):
        admission.advance(3)


@pytest.mark.parametrize("arguments, named", [((-1, 1), "max_staleness"), ((0, 0), "groups_per_step")])
def test_a_bound_or_batch_that_cannot_work_is_refused(arguments: tuple[int, int], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} must be >= .*, got"):
        Admission(*arguments)


@pytest.mark.parametrize("window", [-0.1, 1.1, float("nan")])
def test_a_window_outside_of_the_bound_is_refused(window: float) -> None:
    with pytest.raises(ConfigError, match=r"window must lie in \[0, 1\], got"):
        Admission(1, 1, window=window)


def test_an_admission_restored_with_a_wider_window_admits_when_enough_slots_are_free_again() -> None:
    admission = Admission(1, 2)
    tickets = list(iter(admission.reserve, None))
    narrow = Admission(1, 2, window=1.0)
    narrow.load_state_dict(admission.state_dict())
    for freed in range(3):
        assert narrow.reserve() is None, f"{len(tickets) - freed} of 2 slots are taken"
        narrow.give_back()
    assert narrow.reserve() is not None


def test_a_batch_with_groups_that_were_trained_before_takes_fewer_live_ones_and_all_its_slots() -> None:
    admission = Admission(1, 2)
    for _ in range(3):
        admission.reserve()
    admission.consume(0, num_live=1)
    assert (admission.live, admission.unreleased, admission.free) == (2, 2, 0)
    admission.release(1)
    assert admission.free == 2


def test_a_restored_admission_goes_on_where_it_was_saved() -> None:
    admission = Admission(1, 2, start_version=3)
    admission.reserve()
    admission.reserve()
    admission.consume(3)
    restored = Admission(1, 2)
    restored.load_state_dict(admission.state_dict())
    assert restored.state_dict() == admission.state_dict()
    assert restored.reserve() == admission.reserve()


# --- what a batch must hold


def keeps_f(versions: list[int], policy_version: int, bound: int, count: int) -> bool:
    """F, by its definition: batches policy_version..d have places for all that may be trained at d at the latest."""
    latest = max(versions, default=0) + bound
    return all(
        sum(v + bound <= d for v in versions) <= (d - policy_version + 1) * count
        for d in range(policy_version, latest + 1)
    ) and all(v + bound >= policy_version for v in versions)


def drawn(rng: random.Random) -> tuple[int, int, int, list[int]]:
    """A bound, a batch size, a version and groups for which F holds."""
    while True:
        bound, count, at = rng.randint(0, 3), rng.randint(1, 3), rng.randint(0, 5)
        versions = [rng.randint(max(0, at - bound), at) for _ in range(rng.randint(count, (bound + 1) * count))]
        if keeps_f(versions, at, bound, count):
            return bound, count, at, versions


def test_a_batch_that_meets_the_needs_and_no_other_keeps_f_at_the_next_version() -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(2000):
        bound, count, at, versions = drawn(rng)
        needed = needs(Counter(versions), at, bound, count)
        for batch in itertools.combinations(range(len(versions)), count):
            meets = all(sum(versions[i] <= v for i in batch) >= n for v, n in needed.items())
            left = [v for i, v in enumerate(versions) if i not in batch]
            assert meets == keeps_f(left, at + 1, bound, count)
            refused += not meets
    assert refused > 1000, "every batch would have done"


def test_the_chosen_batch_is_the_most_preferred_of_all_that_meet_the_needs() -> None:
    rng = random.Random(1)
    passed_over = 0
    for _ in range(2000):
        bound, count, at, versions = drawn(rng)
        needed = needs(Counter(versions), at, bound, count)
        order = rng.sample(range(len(versions)), len(versions))
        chosen = choose(order, versions.__getitem__, needed, count)
        allowed = (
            batch
            for batch in itertools.combinations(order, count)
            if all(sum(versions[i] <= v for i in batch) >= n for v, n in needed.items())
        )
        assert chosen == list(next(allowed)), "combinations come in the order of preference"
        passed_over += chosen != order[:count]
    assert passed_over > 100, "the needs never mattered"


def test_a_group_without_a_slot_takes_a_place_and_meets_no_need() -> None:
    versions = [None, 1, 0, 1]
    needed = needs(Counter({0: 1, 1: 2}), 0, 0, 3)
    assert needed == {0: 1, 1: 0}
    assert choose([0, 1, 2, 3], versions.__getitem__, needed, 3) == [0, 1, 2]
    assert choose([0, 1, 3, 2], versions.__getitem__, needed, 3) == [0, 1, 2], "the last place was due"


def test_where_f_is_broken_a_batch_is_chosen_all_the_same() -> None:
    versions = [0, 0, 0, 0, 1]
    needed = needs(Counter(versions), 4, 1, 2)
    assert max(needed.values()) == 2
    assert choose([4, 3, 2, 1, 0], versions.__getitem__, needed, 2) == [3, 2]


@pytest.mark.parametrize(("max_staleness", "groups_per_step"), GRID)
def test_admission_cannot_be_wider(max_staleness: int, groups_per_step: int) -> None:
    """One group more than there are slots, all of the released version: no order of batches keeps the bound."""
    admission = Admission(max_staleness, groups_per_step)
    versions = [ticket.version for ticket in iter(admission.reserve, None)]
    assert keeps_f(versions, 0, max_staleness, groups_per_step)
    assert not keeps_f([*versions, admission.released], 0, max_staleness, groups_per_step)
