"""What the replay keeps of a group: no padding, memory of its own, what the bookkeeping needs, a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from forge import channel
from forge.batch import collate, make_group, oldest_version
from forge.errors import MemoryBudgetError, SchemaError
from forge.memory import memory_limit_bytes
from forge.packing import pad
from replay.buffer import ReplayBuffer
from replay.staleness import Admission, Ticket
from replay.storage import MemoryBudget, Record, store, summarize


def group(*versions: list[int]) -> TensorDict:
    """A group with one episode for each list of token versions."""
    tokens = [[1 + t for t in range(len(v))] for v in versions]
    td = make_group([7, 8], tokens, [[-0.5] * len(v) for v in versions], list(versions), group_id=0)
    td["rewards"] = torch.arange(len(versions)).float()
    td["advantages"] = torch.tensor([(-1.0) ** i * i for i in range(len(versions))])
    return td


def test_a_record_holds_what_the_bookkeeping_needs() -> None:
    record = store(group([4, 3, 5], [], [6]), 9)
    assert record.oldest == [3, -1, 6]
    assert record.newest == 6
    assert record.num_tokens == 4
    assert record.rewards == [0, 1, 2]
    assert not record.degenerate
    assert record.lengths == [5, 2, 3]
    assert record.magnitude == 1.0
    assert record.group["group_id"].tolist() == [9, 9, 9]


def test_no_padding_is_kept() -> None:
    record = store(group([0] * 500, [0], [0]), 0)
    assert record.group["tokens"].shape == (502 + 3 + 3,)
    assert record.nbytes == 508 * (8 + 1 + 4 + 8) + 3 * (8 + 4 + 4 + 8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=4))
def test_a_group_comes_back_as_it_was_added(versions: list[list[int]]) -> None:
    td = group(*versions)
    record = store(td, 3)
    back = pad([record.group])
    td["group_id"] = torch.full_like(td["group_id"], 3)
    expected = collate([td])
    for key in expected.keys():  # noqa: SIM118
        assert torch.equal(back[key], expected[key]), key
    assert record.oldest == [min(v, default=-1) for v in versions]
    assert min((v for v in record.oldest if v >= 0), default=-1) == oldest_version(td)
    assert record.newest == max(map(max, filter(None, versions)), default=-1)


def test_what_is_kept_is_read_again_as_the_same_record() -> None:
    """A journal writes the group; what is read back must not need the padded one."""
    record = store(group([4, 3], [5]), 1)
    again = summarize(record.group)
    assert all(getattr(again, name) == getattr(record, name) for name in Record.__slots__ if name != "arrays")
    assert (again.group == record.group).all()


def test_the_group_that_was_added_may_change_later() -> None:
    td = group([1, 2], [1, 1])
    record = store(td, 0)
    before = record.group.clone()
    for key in td.keys():  # noqa: SIM118
        td[key].zero_()
    assert all(torch.equal(record.group[key], before[key]) for key in before.keys())  # noqa: SIM118


def test_the_memory_of_the_sender_is_free_once_the_group_is_stored() -> None:
    sender, receiver = channel.Pool(inline_bytes=0), channel.Pool()
    record = store(receiver.open(sender.put(group([1] * 300, [1] * 300))), 0)
    sender.reclaim()
    assert sender.stats().busy_bytes == 0
    assert record.group["tokens"].shape == (604,)
    sender.shutdown()
    receiver.shutdown()


def test_equal_rewards_are_degenerate_also_where_their_deviation_is_not_zero() -> None:
    td = group(*[[0]] * 8)
    td["rewards"] = torch.full((8,), 0.35)
    assert store(td, 0).degenerate
    td["rewards"][3] += 1e-6
    assert not store(td, 0).degenerate


def broken(key: str, index: Any, value: Any) -> TensorDict:
    td = group([1, 1], [1])
    td[key][index] = value
    return td


@pytest.mark.parametrize(
    "td, text",
    [
        (group([1])[:0], "the group has 0 episodes"),
        (group([1]).exclude("rewards"), "rewards is missing"),
        (broken("token_versions", (0, 3), -1), "token_versions is negative under loss_mask"),
        (broken("rewards", 0, torch.nan), "rewards holds nan"),
        (broken("behavior_logprobs", (0, 2), torch.nan), "behavior_logprobs under loss_mask holds nan"),
    ],
)
def test_a_malformed_group_is_refused(td: TensorDict, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        store(td, 0)


def test_a_reward_of_nan_is_refused_where_nothing_else_is_checked() -> None:
    with pytest.raises(SchemaError, match="rewards must be finite"):
        summarize(broken("rewards", 1, torch.nan))


# The budget


def test_a_group_that_does_not_fit_is_an_error_that_names_every_number() -> None:
    budget = MemoryBudget(100)
    budget.hold(70)
    with pytest.raises(MemoryBudgetError, match=r"a group of 31 bytes .* holds 70 bytes .*memory_bytes allows 100"):
        budget.hold(31)
    assert budget.held_bytes == 70
    budget.hold(30)


def test_what_running_groups_will_take_is_estimated_by_the_largest_so_far() -> None:
    budget = MemoryBudget(100)
    assert budget.estimate(1000) == 0  # nothing is known yet
    budget.hold(30)
    budget.hold(20)
    budget.free(30)
    assert budget.estimate(2) == 60
    assert budget.fits(80)
    assert not budget.fits(81)


def test_without_a_number_the_budget_is_a_quarter_of_what_the_process_may_use() -> None:
    assert MemoryBudget().limit_bytes == memory_limit_bytes() // 4 > 1 << 20


# The buffer within its budget


def buffer(limit_bytes: int, max_staleness: int = 3, **options: Any) -> ReplayBuffer:
    """Two groups a batch."""
    return ReplayBuffer(Admission(max_staleness, 2), memory=MemoryBudget(limit_bytes), **options)


def reserved(replay: ReplayBuffer) -> Ticket:
    ticket = replay.reserve()
    assert ticket is not None
    return ticket


SIZE = store(group([0], [0]), 0).nbytes


def added(replay: ReplayBuffer, version: int = 0) -> Ticket:
    ticket = reserved(replay)
    replay.add(ticket, store(group([version], [version]), ticket.seq))
    return ticket


def test_groups_are_begun_while_there_is_memory_for_them_and_again_once_a_batch_has_left() -> None:
    replay = buffer(3 * SIZE)
    added(replay)
    running = [reserved(replay), reserved(replay)]
    assert replay.reserve() is None
    assert replay.admission.free > 0  # a slot there is
    for ticket in running:
        replay.add(ticket, store(group([0], [0]), ticket.seq))
    assert replay.memory.held_bytes == 3 * SIZE
    assert replay.reserve() is None
    assert replay.sample(0) is not None
    assert replay.memory.held_bytes == SIZE
    assert reserved(replay)


def test_what_leaves_untrained_gives_its_memory_back() -> None:
    replay = buffer(4 * SIZE, max_staleness=0, degenerate="drop")
    ticket = reserved(replay)
    same = group([0], [0])
    same["rewards"] = torch.zeros(2)
    replay.add(ticket, store(same, ticket.seq))
    assert replay.memory.held_bytes == 0
    added(replay)
    replay.fail(reserved(replay))
    assert replay.memory.held_bytes == SIZE
    replay.sample(1)  # too old by now
    assert replay.memory.held_bytes == 0


def test_the_groups_of_one_batch_are_always_begun_and_fail_loudly_where_they_cannot_fit() -> None:
    """A reserve that waited for memory that only a batch can free would wait for ever."""
    replay = buffer(SIZE + 1)
    added(replay)
    with pytest.raises(MemoryBudgetError, match=f"holds {SIZE} bytes"):
        added(replay)
    replay.fail(Ticket(1, 0))
    assert replay.memory.held_bytes == SIZE
    assert replay.num_running == 0


def test_groups_that_were_trained_already_make_room_for_new_ones() -> None:
    replay = buffer(4 * SIZE, max_uses=2)
    added(replay)
    added(replay)
    assert replay.sample(0) is not None
    assert replay.memory.held_bytes == 2 * SIZE
    for _ in range(4):
        added(replay)
    assert replay.memory.held_bytes == 4 * SIZE
    assert replay.num_queued == 4


def test_a_buffer_that_goes_on_from_a_state_holds_what_the_state_holds() -> None:
    replay = buffer(4 * SIZE)
    added(replay)
    reserved(replay)
    again = buffer(4 * SIZE)
    again.load_state_dict(replay.state_dict())
    assert again.memory.held_bytes == SIZE
    with pytest.raises(MemoryBudgetError):
        buffer(SIZE - 1).load_state_dict(replay.state_dict())


def test_a_wait_for_a_slot_says_how_much_memory_is_held() -> None:
    replay = buffer(4 * SIZE)
    added(replay)
    assert f"{SIZE} of {4 * SIZE} bytes of memory (replay.memory_bytes) are held" in replay.describe_slots()


def test_recorded_supports_are_kept_counted_and_read_again() -> None:
    td, plain = group([4, 3], [5]), store(group([4, 3], [5]), 1)
    kept = torch.full((2, 4, 3), -1, dtype=torch.int32)
    kept[..., 0] = torch.where(td["loss_mask"], td["tokens"], -1)
    td["kept_tokens"] = kept
    record = store(td, 1)
    assert record.nbytes == plain.nbytes + 7 * 3 * 4
    assert torch.equal(pad([record.group])["kept_tokens"], kept)
    assert torch.equal(summarize(record.group).group["kept_tokens"], record.group["kept_tokens"])
