"""What becomes of a group: trained whole and in order, or dropped, counted and its slot returned."""

from __future__ import annotations

import itertools

import pytest
import torch

from forge.batch import make_group
from forge.errors import RewardError, SchemaError, StalenessError
from replay.buffer import ReplayBuffer
from replay.staleness import Admission, Ticket
from replay.storage import Record, summarize


def group(*versions: list[int], rewards: list[float] | None = None) -> Record:
    """A group with one episode for each list of token versions."""
    td = make_group([7], [[1] * len(v) for v in versions], [[0.0] * len(v) for v in versions], versions, group_id=0)
    td["rewards"] = torch.tensor(rewards or [float(i) for i in range(len(versions))])
    return summarize(td)


def make(max_staleness: int, groups_per_step: int, **options: object) -> tuple[ReplayBuffer, list[Ticket]]:
    """A buffer and all its tickets, reserved."""
    buffer = ReplayBuffer(Admission(max_staleness, groups_per_step), **options)  # type: ignore[arg-type]
    return buffer, list(iter(buffer.reserve, None))


def taken(buffer: ReplayBuffer, policy_version: int) -> list[int] | None:
    """The numbers of the groups of the batch, if there is one."""
    choice = buffer.sample(policy_version)
    return None if choice is None else choice.seqs


def test_strict_fifo_waits_for_the_oldest_reservations_and_keeps_their_order() -> None:
    buffer, tickets = make(1, 2, window=0.0)
    records = [group([0], [0]) for _ in tickets]
    for i in (3, 2, 1):
        buffer.add(tickets[i], records[i])
        assert buffer.sample(0) is None
    buffer.add(tickets[0], records[0])
    assert taken(buffer, 0) == [0, 1]
    assert taken(buffer, 1) == [2, 3]


def test_a_full_window_takes_what_is_complete_until_the_bound_of_the_others_is_reached() -> None:
    buffer, tickets = make(1, 2)
    for i in (3, 2):
        buffer.add(tickets[i], group([0], [0]))
    assert taken(buffer, 0) == [2, 3], "a straggler held up a batch in which it need not be"
    buffer.release(1)
    for ticket in iter(buffer.reserve, None):
        buffer.add(ticket, group([1], [1]))
    buffer.add(tickets[1], group([0], [0]))
    assert buffer.sample(1) is None, "the last batch that may hold the straggler went without it"
    buffer.add(tickets[0], group([0], [0]))
    assert taken(buffer, 1) == [0, 1]
    assert taken(buffer, 2) == [4, 5]
    assert buffer.counts.groups_expired == 0


def test_a_failed_group_makes_way_for_the_next_one() -> None:
    buffer, tickets = make(1, 2)
    for i in (1, 2):
        buffer.add(tickets[i], group([0], [0]))
    buffer.fail(tickets[0])
    assert buffer.admission.free == 1
    assert buffer.sample(0) is not None


def test_queued_groups_that_age_past_the_bound_are_dropped_counted_and_their_slots_returned() -> None:
    buffer, tickets = make(2, 1)
    for ticket in tickets:
        buffer.add(ticket, group([0, 0], [0, 0, 0]))
    assert buffer.sample(5) is None
    assert buffer.counts.groups_expired == 3
    assert (buffer.counts.episodes_dropped, buffer.counts.tokens_wasted) == (6, 15)
    assert buffer.counts.episodes_trained == 0
    buffer.release(5)
    assert buffer.admission.free == buffer.admission.slots
    fresh = buffer.reserve()
    assert fresh is not None
    buffer.add(fresh, group([5], [5]))
    assert buffer.sample(5) is not None


def test_staleness_counts_from_the_oldest_token_of_any_episode() -> None:
    buffer, tickets = make(1, 1)
    buffer.sample(2)
    buffer.add(tickets[0], group([1, 2], [2, 0, 2]))
    buffer.add(tickets[1], group([2, 1], [2, 2]))
    kept = buffer.sample(2)
    assert buffer.counts.groups_expired == 1
    assert kept is not None
    assert kept.records[0].oldest == [1, 2]


def test_padding_and_prompt_versions_never_make_a_group_stale() -> None:
    buffer, tickets = make(0, 1)
    buffer.sample(3)
    buffer.add(tickets[0], group([3], [3, 3, 3]))
    assert buffer.sample(3) is not None


def test_a_group_that_trains_no_token_is_not_stale() -> None:
    record = group([0], [0])
    record.group["loss_mask"][:] = False
    assert summarize(record.group).oldest == [-1, -1]
    assert not summarize(record.group).is_stale(100, 0)


def test_a_version_above_256_stays_exact() -> None:
    buffer, tickets = make(0, 1)
    buffer.sample(257)
    buffer.add(tickets[0], group([257], [257]))
    assert buffer.sample(257) is not None
    assert buffer.counts.groups_expired == 0


def test_tokens_of_a_version_that_is_not_made_yet_are_an_error() -> None:
    buffer, tickets = make(0, 1)
    buffer.add(tickets[0], group([0], [1]))
    with pytest.raises(StalenessError, match="tokens of version 1, the trainer stands at 0"):
        buffer.sample(0)


def test_degenerate_groups_are_trained_and_counted_in_mode_keep() -> None:
    buffer, tickets = make(0, 1, degenerate="keep", max_degenerate_in_a_row=1)
    buffer.add(tickets[0], group([0], [0], rewards=[0.1, 0.1]))
    assert buffer.sample(0) is not None
    assert (buffer.counts.groups_degenerate, buffer.counts.episodes_dropped) == (1, 0)


@pytest.mark.parametrize("reward", [0.35, 0.1, 0.7, 0.0])
def test_degenerate_groups_return_their_slot_at_once_in_mode_drop(reward: float) -> None:
    buffer, tickets = make(0, 1, degenerate="drop")
    buffer.add(tickets[0], group(*[[0]] * 8, rewards=[reward] * 8))
    assert buffer.admission.free == 1
    assert buffer.sample(0) is None
    assert (buffer.counts.groups_degenerate, buffer.counts.episodes_dropped) == (1, 8)


def test_too_many_degenerate_groups_in_a_row_end_the_run_naming_the_reward() -> None:
    buffer, _ = make(0, 1, degenerate="drop", max_degenerate_in_a_row=3, reward_name="apps.x:my_reward")
    buffer.fail(Ticket(0, 0))
    version = itertools.count()

    def add(*rewards: float) -> None:
        ticket = buffer.reserve()
        assert ticket is not None
        buffer.add(ticket, group([0], [0], rewards=list(rewards)))
        if rewards[0] != rewards[1]:
            assert buffer.sample(next(version)) is not None

    add(0.5, 0.5)
    add(0.5, 0.5)
    add(0.0, 1.0)
    buffer.release(1)
    add(0.5, 0.5)
    add(0.5, 0.5)
    with pytest.raises(RewardError, match=r"3 groups in a row .* apps.x:my_reward gave every episode .* 0\.5"):
        add(0.5, 0.5)


def test_a_ticket_is_good_for_one_group() -> None:
    buffer, tickets = make(0, 2)
    buffer.add(tickets[0], group([0], [0]))
    for ticket in (tickets[0], Ticket(99, 0)):
        with pytest.raises(StalenessError, match=f"ticket {ticket.seq} is not running"):
            buffer.add(ticket, group([0], [0]))


def test_failing_a_ticket_twice_or_after_its_group_came_changes_nothing() -> None:
    buffer, tickets = make(0, 2)
    buffer.add(tickets[0], group([0], [0]))
    for ticket in (tickets[0], tickets[1], tickets[1], Ticket(99, 0)):
        buffer.fail(ticket)
    assert (buffer.num_queued, buffer.num_running, buffer.admission.free) == (1, 0, 1)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_an_error(reward: float) -> None:
    with pytest.raises(SchemaError, match="rewards must be finite"):
        group([0], [0], rewards=[0.0, reward])


def test_the_texts_of_the_deadlines_name_versions_and_groups() -> None:
    now = 100.0
    buffer, tickets = make(1, 2, clock=lambda: now)
    for ticket in tickets[:3]:
        buffer.add(ticket, group([0], [0]))
    assert buffer.sample(0) is not None
    now = 112.5
    slots, missing = buffer.describe_slots(), buffer.describe_missing()
    assert "2 are held by batches whose weights are not released yet (versions: 1; released: 0)" in slots
    assert "1 by queued groups, 1 by running groups (seq 3 since 12.5 s)" in slots
    assert missing.startswith("1 of the next 2 groups are complete; running: seq 3 since 12.5 s;")
    buffer.fail(tickets[3])
    assert "not reserved by any rollout loop yet: 1" in buffer.describe_missing()
