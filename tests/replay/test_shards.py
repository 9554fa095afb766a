"""A batch cut into what each data-parallel rank trains."""

from __future__ import annotations

import random

import pytest
import torch

from forge.batch import check_batch, make_group
from forge.errors import ConfigError
from replay.shards import balance, make_shards


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


def test_each_shard_is_a_valid_batch_padded_to_its_own_longest_episode() -> None:
    groups = [
        make_group([1, 2], [[3] * 30, [4]], [[-0.5] * 30, [-0.25]], [[0] * 30, [1]], group_id=0, pad_id=9),
        make_group([5], [[6], [7, 7]], [[-1.0], [-2.0] * 2], [[1], [1] * 2], group_id=1, pad_id=9),
    ]
    shards = make_shards(groups, 2, pad_id=9)
    for shard in shards:
        check_batch(shard)
        assert shard["tokens"].shape[1] == int(shard["lengths"].max())
    long, short = shards
    assert long["tokens"].tolist() == [[1, 2] + [3] * 30]
    assert short["tokens"][0].tolist() == [1, 2, 4]
    assert short["tokens"][1].tolist() == [5, 6, 9]
    assert short["group_id"].tolist() == [0, 1, 1]
    assert torch.equal(short["behavior_logprobs"][2], torch.tensor([0.0, -2.0, -2.0]))
