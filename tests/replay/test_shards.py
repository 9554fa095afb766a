"""A batch cut into what each data-parallel rank trains."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from forge import channel
from forge.batch import check_packed, make_group
from forge.errors import ConfigError
from forge.packing import flatten
from replay.shards import balance, hand_over, plan_shards, waste

KEYS = ("group_id", "rewards", "lengths")


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_every_row_goes_to_one_shard_and_no_shard_is_empty(num_shards: int) -> None:
    rng = random.Random(num_shards)
    for _ in range(200):
        lengths = [rng.randint(1, 100) for _ in range(rng.randint(num_shards, 40))]
        shards = balance(lengths, num_shards)
        assert sorted(row for shard in shards for row in shard) == list(range(len(lengths)))
        assert all(shards)
        assert all(shard == sorted(shard) for shard in shards)


def test_the_heaviest_shard_exceeds_the_mean_by_less_than_the_longest_row() -> None:
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randint(1, 1000) for _ in range(64)]
        loads = [sum(lengths[row] for row in shard) for shard in balance(lengths, 4)]
        assert max(loads) <= sum(lengths) / 4 + min(max(lengths), sum(lengths) / 12)


def test_long_and_short_rows_share_a_shard() -> None:
    assert balance([100, 1, 1, 100, 98, 1, 1, 98], 4) == [[0], [3], [1, 4, 5], [2, 6, 7]]


@pytest.mark.parametrize("num_shards", [0, 5])
def test_fewer_rows_than_shards_is_an_error(num_shards: int) -> None:
    with pytest.raises(ConfigError, match=f"num_shards is {num_shards}, the batch has 4 episodes"):
        balance([1, 1, 1, 1], num_shards)


def flat_groups() -> list[TensorDict]:
    groups = [
        make_group([1, 2], [[3] * 30, [4]], [[-0.5] * 30, [-0.25]], [[0] * 30, [1]], group_id=0),
        make_group([5], [[6], [7, 7]], [[-1.0], [-2.0] * 2], [[1], [1] * 2], group_id=1),
    ]
    return [flatten(group) for group in groups]


def test_each_rank_gets_its_own_episodes_packed_and_no_others() -> None:
    handles = hand_over(flat_groups(), 2, 4, channel)
    long, short = [channel.open(handle) for handle in handles]
    for shard in (long, short):
        check_packed(shard)
    assert long["tokens"].tolist() == [1, 2] + [3] * 30
    assert long["row_offsets"].tolist() == [0, 32]
    assert short["tokens"].tolist() == [1, 2, 4, 5, 7, 7, 5, 6]
    assert short["row_offsets"].tolist() == [0, 3, 6, 8]
    assert short["group_id"].tolist() == [0, 1, 1]
    assert short["behavior_logprobs"].tolist() == [0, 0, -0.25, 0, -2, -2, 0, -1]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=3, max_size=6), st.integers(1, 3))
def test_all_ranks_together_get_every_episode_once(lengths: list[list[int]], num_shards: int) -> None:
    groups = []
    for number, row in enumerate(lengths):
        ones = [[1] * n for n in row]
        group = make_group([9], ones, [[-1.0] * n for n in row], [[0] * n for n in row], group_id=number)
        group["rewards"] = torch.arange(len(row)).float()
        groups.append(flatten(group))
    handles = hand_over(groups, num_shards, 21, channel)
    shards = [channel.take(handle) for handle in handles]
    found = [(g, r, n) for td in shards for g, r, n in zip(*(td[k].tolist() for k in KEYS), strict=True)]
    assert sorted(found) == [(g, float(e), n + 1) for g, row in enumerate(lengths) for e, n in enumerate(row)]
    for td in shards:
        check_packed(td)
        assert int(td["row_offsets"].diff().max()) <= 21


def test_a_shard_is_copied_once_into_memory_that_the_channel_lends() -> None:
    """What `put` is given must come from `alloc`: then it copies nothing."""
    pool = channel.Pool(inline_bytes=0)
    lent: list[TensorDict] = []

    class Spy:
        def alloc(self, like: TensorDict) -> TensorDict:
            lent.append(pool.alloc(like))
            return lent[-1]

        def put(self, td: TensorDict, readers: int = 1) -> Any:
            assert any(td is one for one in lent)
            return pool.put(td)

    handles = hand_over(flat_groups(), 2, 100, Spy())
    assert pool.stats().num_segments == 1
    assert [pool.open(handle)["tokens"].shape for handle in handles] == [td["tokens"].shape for td in lent]
    lent.clear()
    pool.shutdown()


def test_waste_is_what_stays_empty_in_rows_and_what_padding_would_cost() -> None:
    lengths = [10, 6, 4, 4]
    assert plan_shards(lengths, 1, 16) == [[[0, 1], [2, 3]]]
    assert waste(lengths, plan_shards(lengths, 1, 16), 16) == {
        "pack/waste": 1 - 24 / 32,
        "pack/padded_waste": 1 - 24 / (10 + 12 + 4),
    }
    assert plan_shards(lengths, 2, 16) == [[[0, 3]], [[1, 2]]]
    assert waste(lengths, plan_shards(lengths, 2, 16), 16) == {
        "pack/waste": 1 - 24 / 32,
        "pack/padded_waste": 1 - 24 / (10 + 12 + 4),
    }
    assert waste([5, 5], [[[0, 1]]], 10) == {"pack/waste": 0.0, "pack/padded_waste": 0.0}


def test_fewer_episodes_than_ranks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num_shards is 5, the batch has 4 episodes"):
        hand_over(flat_groups(), 5, 100, channel)


def test_a_shard_can_be_opened_by_as_many_as_share_it() -> None:
    handles = hand_over(flat_groups(), 2, 100, channel, readers=2)
    assert [handle.readers for handle in handles] == [2, 2]
    for handle in handles:
        first, second = channel.open(handle), channel.open(handle)
        assert torch.equal(first["tokens"], second["tokens"])


@given(st.lists(st.integers(1, 60), min_size=2, max_size=30), st.integers(1, 2), st.integers(1, 100))
def test_pairs_go_to_one_rank_and_one_row(lengths: list[int], num_shards: int, row_tokens: int) -> None:
    lengths = [n + extra for n in lengths for extra in (0, 3)]
    plan = plan_shards(lengths, num_shards, row_tokens, together=2)
    rows = [row for rank in plan for row in rank]
    assert sorted(episode for row in rows for episode in row) == list(range(len(lengths)))
    assert all(row[i] % 2 == 0 and row[i + 1] == row[i] + 1 for row in rows for i in range(0, len(row), 2))
    assert all(sum(lengths[i] for i in row) <= row_tokens or len(row) == 2 for row in rows)
    assert 0 <= waste(lengths, plan, row_tokens, together=2)["pack/padded_waste"] < 1
