"""Admission by slots: the arithmetic of the bound."""

from __future__ import annotations

import itertools
import random

import pytest

from forge.errors import ConfigError, StalenessError
from replay.staleness import Admission

GRID = list(itertools.product(range(4), range(1, 4)))


@pytest.mark.parametrize("max_staleness, groups_per_step", GRID)
def test_there_are_bound_plus_one_batches_of_slots(max_staleness: int, groups_per_step: int) -> None:
    admission = Admission(max_staleness, groups_per_step)
    tickets = list(iter(admission.reserve, None))
    assert [t.seq for t in tickets] == list(range((max_staleness + 1) * groups_per_step))
    assert admission.free == 0


@pytest.mark.parametrize("max_staleness, groups_per_step", GRID)
def test_capacity_agrees_with_the_counter_of_accepted_and_running_groups(
    max_staleness: int, groups_per_step: int
) -> None:
    rng = random.Random(max_staleness * 10 + groups_per_step)
    admission = Admission(max_staleness, groups_per_step)
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
        assert admission.free == oracle
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
