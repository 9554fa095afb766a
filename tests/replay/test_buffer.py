"""What becomes of a group: trained whole and in order, or dropped, counted and its slot returned."""

from __future__ import annotations

import itertools
import pickle
from fractions import Fraction

import pytest
import torch

from forge.batch import make_group
from forge.errors import RewardError, SchemaError, StalenessError
from replay.buffer import ReplayBuffer
from replay.policies import POLICIES, Policy, strict, uniform
from replay.staleness import Admission, Ticket, num_slots
from replay.storage import Record, summarize


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def group(*versions: list[int], rewards: list[float] | None = None) -> Record:
    """A group with one episode for each list of token versions."""
    td = make_group([7], [[1] * len(v) for v in versions], [[0.0] * len(v) for v in versions], versions, group_id=0)
    td["rewards"] = torch.tensor(rewards or [float(i) for i in range(len(versions))])
    return summarize(td)


def make(max_staleness: int, groups_per_step: int, **options: object) -> tuple[ReplayBuffer, list[Ticket]]:
    """A buffer and all its tickets, reserved."""
    buffer = ReplayBuffer(Admission(max_staleness, groups_per_step), **options)  # type: ignore[arg-type]
    return buffer, list(iter(buffer.reserve, None))


def add_one(buffer: ReplayBuffer, version: int) -> None:
    """Reserves a group, and adds it with tokens of `version`."""
    ticket = buffer.reserve()
    assert ticket is not None
    buffer.add(ticket, group([version], [version]))


def taken(buffer: ReplayBuffer, policy_version: int) -> list[int] | None:
    """The numbers of the groups of the batch, if there is one."""
    choice = buffer.sample(policy_version)
    return None if choice is None else choice.seqs


def test_strict_fifo_waits_for_the_oldest_reservations_and_keeps_their_order() -> None:
    buffer, tickets = make(1, 2, policy=strict)
    records = [group([0], [0]) for _ in tickets]
    for i in (3, 2, 1):
        buffer.add(tickets[i], records[i])
        assert buffer.sample(0) is None
    buffer.add(tickets[0], records[0])
    assert taken(buffer, 0) == [0, 1]
    assert taken(buffer, 1) == [2, 3]


def test_fifo_takes_what_is_complete_until_the_bound_of_the_others_is_reached() -> None:
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


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_queued_groups_that_age_past_the_bound_are_dropped_counted_and_their_slots_returned(policy: Policy) -> None:
    buffer, tickets = make(2, 1, policy=policy)
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


def test_a_version_that_jumps_while_groups_are_in_flight_stops_admission_and_never_the_bound() -> None:
    """The counter of other systems counts such groups twice, or never again."""
    clock = Clock()
    buffer, tickets = make(1, 2, clock=clock)
    assert buffer.sample(5) is None
    assert buffer.admission.free == 0
    for ticket, version in zip(tickets, (0, 3, 4, 5), strict=True):
        buffer.add(ticket, group([version], [version]))
    assert buffer.counts.groups_expired == 2
    assert taken(buffer, 5) == [2, 3]
    assert buffer.admission.free == 0
    buffer.release(6)
    admitted = list(iter(buffer.reserve, None))
    assert [ticket.version for ticket in admitted] == [6] * 4


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
    assert slots.startswith("of 4 slots (max_staleness 1, 2 groups a step, window 0) ")
    assert "2 are held by batches whose weights are not released yet (versions: 1; released: 0)" in slots
    assert "1 by queued groups, 1 by running groups (seq 3 since 12.5 s)" in slots
    assert missing.startswith("1 of the next 2 groups are complete; running: seq 3 since 12.5 s;")
    assert buffer.describe_wait() == (
        "1 of 2 groups are there, 1 run, the oldest for 12 s; "
        "2 of 4 slots are held by batches whose weights are not released yet"
    )
    buffer.fail(tickets[3])
    assert "not reserved by any rollout loop yet: 1" in buffer.describe_missing()


# --- what a window does

BOUNDS = list(itertools.product(range(5), range(1, 4), (0.0, 0.3, 0.5, 0.75, 1.0)))


def windowed(max_staleness: int, groups_per_step: int, window: float) -> ReplayBuffer:
    return ReplayBuffer(Admission(max_staleness, groups_per_step, window=window))


@pytest.mark.parametrize(("max_staleness", "groups_per_step", "window"), BOUNDS)
def test_groups_that_are_complete_in_time_are_trained_within_what_the_window_leaves(
    max_staleness: int, groups_per_step: int, window: float
) -> None:
    buffer = windowed(max_staleness, groups_per_step, window)
    stalest = []
    for version in range(3 * max_staleness + 3):
        for ticket in iter(buffer.reserve, None):
            buffer.add(ticket, group([version], [version]))
        choice = buffer.sample(version)
        assert choice is not None
        stalest.append(max(version - record.oldest[0] for record in choice.records))
        buffer.release(version + 1)
    left = max_staleness - int(Fraction(str(window)) * max_staleness)
    assert max(stalest) == stalest[-1] == left, "ceil((1 - w) * S), which is reached"


@pytest.mark.parametrize(("max_staleness", "groups_per_step", "window"), BOUNDS)
def test_a_straggler_is_passed_by_as_many_groups_as_the_window_withholds_and_was_left_free(
    max_staleness: int, groups_per_step: int, window: float
) -> None:
    for place in range(num_slots(max_staleness, groups_per_step, window)):
        buffer = windowed(max_staleness, groups_per_step, window)
        straggler = None
        later: list[int] = []
        for version in range(max_staleness + 2):
            for ticket in iter(buffer.reserve, None):
                if ticket.seq == place:
                    straggler, left_free = ticket, buffer.admission.slots - place - 1
                else:
                    buffer.add(ticket, group([version], [version]))
            others = buffer.num_queued
            choice = buffer.sample(version)
            if choice is None:
                break
            later += [seq for seq in choice.seqs if seq > place]
            buffer.release(version + 1)
        assert straggler is not None
        if others < groups_per_step:
            assert buffer.admission.slots - 1 < groups_per_step, "training stalled for want of other groups"
            continue
        assert version == max_staleness, "training stalled before the straggler was due"
        buffer.add(straggler, group([0], [0]))
        choice = buffer.sample(version)
        assert choice is not None
        later += [seq for seq in choice.seqs if seq > place]
        assert place in choice.seqs
        withheld = int(Fraction(str(window)) * max_staleness * groups_per_step)
        assert len(later) == withheld + left_free


def test_so_many_stragglers_as_later_batches_have_places_for_stall_nothing() -> None:
    """S = 3, B = 2, W = 3: 5 slots, so that with three stragglers the others still fill a batch."""
    for stragglers in range(4):
        buffer = windowed(3, 2, 0.5)
        late: list[Ticket] = []
        for version in range(5):
            for ticket in iter(buffer.reserve, None):
                if ticket.seq < stragglers:
                    late.append(ticket)
                else:
                    buffer.add(ticket, group([version], [version]))
            if buffer.sample(version) is None:
                break
            buffer.release(version + 1)
        # The batch at 3 has places for two; of three, one is due at 2.
        assert version == {0: 4, 1: 3, 2: 3, 3: 2}[stragglers]
        assert buffer.counts.groups_expired == 0
        assert len(late) == stragglers
        for ticket in late:
            buffer.add(ticket, group([0], [0]))
        assert stragglers == 0 or buffer.sample(version) is not None


# --- stragglers


def stalled(count: int, missing: int, max_staleness: int = 0) -> tuple[ReplayBuffer, list[Ticket], Clock]:
    """A buffer whose first `missing` groups run for ever, while the other ones are complete."""
    clock = Clock()
    buffer, tickets = make(max_staleness, count, clock=clock)
    for ticket in tickets[missing:]:
        buffer.add(ticket, group([0], [0]))
    return buffer, tickets, clock


def test_the_one_of_128_that_never_comes_is_dropped_counted_and_replaced() -> None:
    buffer, tickets, clock = stalled(128, 1)
    clock.now = 599.0
    assert buffer.sample(0) is None
    assert buffer.drop_stragglers(600.0) == 0
    clock.now = 600.0
    assert buffer.straggling_since(default=-1.0) == 0.0
    assert buffer.drop_stragglers(600.0) == 1
    assert (buffer.counts.groups_straggled, buffer.admission.free) == (1, 1)
    fresh = buffer.reserve()
    assert fresh is not None
    assert buffer.sample(0) is None
    assert buffer.drop_stragglers(600.0) == 0, "a group that has just begun is no straggler"
    buffer.add(fresh, group([0], [0]))
    assert taken(buffer, 0) == list(range(1, 129))
    assert tickets[0].seq == 0


def test_a_straggler_that_comes_late_is_wasted_and_no_error() -> None:
    buffer, tickets, clock = stalled(2, 2)
    clock.now = 10.0
    assert buffer.drop_stragglers(5.0) == 2
    free = buffer.admission.free
    buffer.add(tickets[0], group([0, 0], [0], rewards=[1.0, 1.0]))
    assert (buffer.counts.tokens_wasted, buffer.counts.episodes_dropped) == (3, 2)
    assert (buffer.counts.groups_degenerate, buffer.counts.groups_failed) == (0, 0)
    assert list(buffer.outcomes) == [(3, True), (2, True)]
    buffer.fail(tickets[1])
    assert (buffer.admission.free, buffer.num_queued, buffer.counts.groups_failed) == (free, 0, 0)
    for ticket in tickets:
        with pytest.raises(StalenessError, match="is not running"):
            buffer.add(ticket, group([0], [0]))


def test_no_more_stragglers_are_dropped_than_it_takes_to_complete_the_batch() -> None:
    clock = Clock()
    buffer, tickets = make(1, 2, clock=clock)
    buffer.add(tickets[3], group([0], [0]))
    buffer.add(tickets[2], group([0], [0]))
    assert taken(buffer, 0) == [2, 3]
    buffer.release(1)
    for ticket in iter(buffer.reserve, None):
        buffer.add(ticket, group([1], [1]))
    buffer.add(tickets[1], group([0], [0]))
    assert buffer.sample(1) is None
    clock.now = 10.0
    assert buffer.drop_stragglers(10.0) == 1
    assert taken(buffer, 1) == [1, 4]


def test_a_group_that_the_batch_does_not_wait_for_is_never_a_straggler() -> None:
    buffer, tickets, clock = stalled(2, 2, max_staleness=1)
    clock.now = 10**6
    assert buffer.straggling_since(default=-1.0) == -1.0
    assert buffer.drop_stragglers(0.0) == 0
    assert taken(buffer, 0) == [2, 3]
    assert [ticket.seq for ticket in buffer.running] == [tickets[0].seq, tickets[1].seq]


# --- groups that are used again


def test_a_group_is_in_so_many_batches_and_holds_a_slot_until_the_first() -> None:
    buffer = ReplayBuffer(Admission(3, 2), max_uses=2)
    for _ in range(2):
        add_one(buffer, version=0)
    assert taken(buffer, 0) == [0, 1]
    assert buffer.admission.live == 0
    add_one(buffer, version=0)
    assert taken(buffer, 1) == [0, 1], "nothing is due yet, so the order of reservation decides"
    assert taken(buffer, 2) is None, "two uses are over"
    add_one(buffer, version=0)
    assert taken(buffer, 2) == [2, 3]
    assert (buffer.counts.groups_trained, buffer.counts.episodes_trained) == (6, 12)
    assert len(buffer.outcomes) == 8, "an episode ends once"
    assert buffer.admission.unreleased == 6, "a batch holds its slots whatever is in it"


def test_a_group_past_its_bound_is_not_used_again_and_not_counted_as_dropped() -> None:
    buffer, tickets = make(1, 1, max_uses=9)
    for ticket in tickets:
        buffer.add(ticket, group([0], [0]))
    assert [taken(buffer, version) for version in range(2)] == [[0], [1]], "the second one was due at 1"
    buffer.release(2)
    assert buffer.sample(2) is None
    assert (buffer.counts.groups_expired, buffer.counts.tokens_wasted) == (0, 0)


def test_at_bound_0_nothing_is_used_again() -> None:
    buffer, _ = make(0, 1, max_uses=9)
    for version in range(4):
        for ticket in [*buffer.running, *iter(buffer.reserve, None)]:
            buffer.add(ticket, group([version], [version]))
        assert taken(buffer, version) == [version]
        assert buffer.sample(version + 1) is None
        buffer.release(version + 1)


# --- saved, restored, served again


def test_what_is_saved_goes_on_in_another_process_with_its_ages_and_counts() -> None:
    clock = Clock()
    buffer, tickets = make(1, 2, clock=clock, degenerate="drop", max_degenerate_in_a_row=3, seed=5)
    clock.now = 7.0
    for ticket in tickets[2:]:
        buffer.add(ticket, group([0], [0]))
    buffer.add(tickets[1], group([0], [0], rewards=[1.0, 1.0]))
    clock.now = 9.0
    state = pickle.loads(pickle.dumps(buffer.state_dict()))
    restored, _ = make(1, 2, clock=lambda: 1000.0, degenerate="drop", max_degenerate_in_a_row=3)
    restored.load_state_dict(state)
    assert restored.counts == buffer.counts
    assert restored.running == buffer.running == [tickets[0]]
    assert restored.straggling_since(default=0.0) == 0.0
    choice = restored.sample(0)
    assert choice is not None
    assert (choice.seqs, choice.ages_s) == ([2, 3], [2.0, 2.0])
    assert restored.admission.free == 1
    assert restored.state_dict()["seed"] == 5
    assert buffer.num_queued == 2, "restoring changed what was saved from"
    restored.add(tickets[0], group([0], [0], rewards=[1.0, 1.0]))
    with pytest.raises(RewardError, match="3 groups in a row"):
        restored.add(restored.reserve() or tickets[0], group([0], [0], rewards=[1.0, 1.0]))


def test_batches_trained_after_the_checkpoint_are_served_again_as_they_were() -> None:
    buffer, _ = make(2, 2, policy=uniform, seed=1)
    saved = buffer.state_dict()
    recorded: list[list[int]] = []
    for version in range(8):
        if version == 4:
            saved, recorded = buffer.state_dict(), []
        for ticket in [*buffer.running, *iter(buffer.reserve, None)]:
            buffer.add(ticket, group([version], [version]))
        choice = buffer.sample(version)
        assert choice is not None
        recorded.append(choice.seqs)
        buffer.release(version + 1)
    again, _ = make(2, 2, policy=uniform, seed=2)
    again.load_state_dict(saved)
    for ticket in iter(again.reserve, None):
        again.add(ticket, group([4], [4]))
    first = recorded[0]
    assert again.take(4, first).seqs == first
    assert again.admission.next_version == 5
    with pytest.raises(StalenessError, match=r"batch of policy_version 5 cannot be served again: .*not complete here"):
        again.take(5, first)


def test_a_batch_of_another_size_is_not_served_again() -> None:
    buffer, tickets = make(0, 2)
    for ticket in tickets:
        buffer.add(ticket, group([0], [0]))
    with pytest.raises(StalenessError, match="a batch has 2"):
        buffer.take(0, [0])
