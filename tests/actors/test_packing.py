"""Laws of cutting a batch into forward passes."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from actors.packing import empty_micro_batch, micro_batches
from forge.batch import collate, make_group
from forge.errors import ConfigError

COMPLETIONS = [[5], [6, 7, 8, 9], [10, 11], [12, 13, 14], [15] * 7, [16, 17]]


def batch() -> TensorDict:
    groups = [
        make_group([1, 2, 3][: 1 + i % 3], [c], [[-0.1 * t for t in c]], [[0] * len(c)], group_id=i)
        for i, c in enumerate(COMPLETIONS)
    ]
    return collate(groups)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("max_tokens", [10, 13, 100])
def test_every_episode_is_in_exactly_one_pass_within_the_budget(packing: bool, max_tokens: int) -> None:
    cuts = micro_batches(batch(), max_tokens, packing=packing)
    assert sorted(row for cut in cuts for row in cut.rows) == list(range(len(COMPLETIONS)))
    assert all(cut.tokens.numel() <= max_tokens for cut in cuts)


@pytest.mark.parametrize("packing", [False, True])
def test_the_trained_tokens_come_in_one_order_for_the_model_and_the_loss(packing: bool) -> None:
    for cut in micro_batches(batch(), 13, packing=packing):
        seen_by_model = cut.tokens[cut.mask]
        expected = [t for row in cut.rows for t in COMPLETIONS[row]]
        assert seen_by_model.tolist() == expected
        assert cut.unpack(seen_by_model.float())[cut.loss_mask].tolist() == expected
        assert torch.allclose(cut.behavior_logprobs[cut.loss_mask], -0.1 * seen_by_model.float())


@pytest.mark.parametrize("packing", [False, True])
def test_positions_count_from_zero_in_every_episode(packing: bool) -> None:
    td = batch()
    for cut in micro_batches(td, 13, packing=packing):
        starts = (cut.position_ids == 0).sum() if packing else torch.tensor(len(cut.rows))
        assert int(starts) == len(cut.rows)


def test_nan_in_padding_stays_outside() -> None:
    td = batch()
    td["behavior_logprobs"][~td["loss_mask"]] = float("nan")
    for cut in micro_batches(td, 13, packing=False):
        assert not cut.behavior_logprobs.isnan().any()


def test_an_empty_pass_trains_nothing() -> None:
    micro = empty_micro_batch(batch())
    assert not micro.mask.any()
    assert not micro.loss_mask.any()
    assert micro.tokens.numel() > 0


def test_an_episode_over_the_budget_is_an_error_that_says_what_to_raise() -> None:
    with pytest.raises(ConfigError, match=r"an episode has 9 tokens, trainer\.microbatch_tokens is 8"):
        micro_batches(batch(), 8, packing=False)
