"""Laws of cutting a batch into forward passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from actors.packing import empty_micro_batch, micro_batches
from forge.batch import collate, make_group
from forge.errors import ConfigError
from forge.packing import first_fit, flatten, pack

COMPLETIONS = [[5], [6, 7, 8, 9], [10, 11], [12, 13, 14], [15] * 7, [16, 17]]


def batch() -> TensorDict:
    groups = [
        make_group([1, 2, 3][: 1 + i % 3], [c], [[-0.1 * t for t in c]], [[0] * len(c)], group_id=i)
        for i, c in enumerate(COMPLETIONS)
    ]
    return collate(groups)


def packed(max_tokens: int) -> TensorDict:
    flat = flatten(batch())
    return pack([flat], first_fit(flat["lengths"].tolist(), max_tokens))


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


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("form", [batch, lambda: packed(13)])
def test_nan_outside_the_mask_stays_outside(form: Callable[[], TensorDict], packing: bool) -> None:
    td = form()
    td["ref_logprobs"] = td["behavior_logprobs"].clone()
    for key in ("behavior_logprobs", "ref_logprobs"):
        td[key][~td["loss_mask"]] = float("nan")
    for cut in micro_batches(td, 13, packing=packing):
        assert cut.ref_logprobs is not None
        assert not (cut.behavior_logprobs.isnan() | cut.ref_logprobs.isnan()).any()


def test_rows_of_a_packed_batch_are_trained_where_they_lie() -> None:
    td = packed(13)
    cuts = micro_batches(td, 13, packing=True)
    assert len(cuts) == len(td["row_offsets"]) - 1
    for cut, start in zip(cuts, td["row_offsets"].tolist(), strict=False):
        for key, value in (("tokens", cut.tokens), ("loss_mask", cut.mask), ("position_ids", cut.position_ids)):
            assert value.data_ptr() == td[key][start:].data_ptr(), key
    assert torch.cat([cut.tokens[0] for cut in cuts]).tolist() == td["tokens"].tolist()


@pytest.mark.parametrize("packing", [False, True])
def test_a_packed_batch_is_trained_as_the_padded_one(packing: bool) -> None:
    """Episode by episode, whatever rows the batch came in: those of the budget, shorter ones, too long ones."""
    width = int(batch()["lengths"].max())

    def episodes(td: TensorDict) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for cut in micro_batches(td, 13, packing=packing):
            values = cut.tokens[cut.mask].float()
            columns = (cut.unpack(values), cut.loss_mask.float(), cut.behavior_logprobs, cut.advantages[:, None])
            wide = [torch.nn.functional.pad(c, (0, width - c.shape[1])) for c in columns]
            found += [tuple(map(tuple, rows)) for rows in zip(*(c.tolist() for c in wide), strict=True)]
        return sorted(found)

    padded = batch()
    padded["advantages"] = torch.arange(len(COMPLETIONS)).float()
    flat = flatten(padded)
    expected = episodes(padded)
    assert len(expected) == len(COMPLETIONS)
    assert episodes(flat) == expected
    for row_tokens in (9, 13, 100):
        assert episodes(pack([flat], first_fit(flat["lengths"].tolist(), row_tokens))) == expected


@pytest.mark.parametrize("form", [batch, lambda: packed(13)])
def test_an_empty_pass_trains_nothing(form: Callable[[], TensorDict]) -> None:
    micro = empty_micro_batch(form())
    assert not micro.mask.any()
    assert not micro.loss_mask.any()
    assert micro.tokens.numel() > 0


@pytest.mark.parametrize("packing", [False, True])
def test_an_episode_over_the_budget_is_an_error_that_says_what_to_raise(packing: bool) -> None:
    for td in (batch(), packed(8)):
        with pytest.raises(ConfigError, match=r"an episode has 9 tokens, trainer\.microbatch_tokens is 8"):
            micro_batches(td, 8, packing=packing)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("form", [batch, lambda: packed(13)])
@pytest.mark.parametrize("episodes", [None, [0, 1, 4, 5]])
def test_pairs_stay_in_one_pass_beside_each_other(
    form: Callable[[], TensorDict], packing: bool, episodes: list[int] | None
) -> None:
    cuts = micro_batches(form(), 18, packing=packing, episodes=episodes, together=2)
    assert len(cuts) > 1
    found = sorted(cut.rows[i : i + 2] for cut in cuts for i in range(0, len(cut.rows), 2))
    assert found == [(row, row + 1) for row in (episodes or range(6))[::2]]
    assert all(cut.tokens.numel() <= 18 for cut in cuts)
    assert len(empty_micro_batch(form(), 2).rows) == 2


def test_a_pair_that_is_too_long_for_a_pass_says_so() -> None:
    with pytest.raises(ConfigError, match=r"2 episodes that stay together have 18 tokens, trainer\.microbatch_tokens"):
        micro_batches(batch(), 17, packing=False, together=2)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("form", [batch, lambda: packed(13)])
def test_recorded_supports_come_in_the_order_of_the_trained_tokens(
    form: Callable[[], TensorDict], packing: bool
) -> None:
    td = form()
    kept = torch.stack([td["tokens"], td["tokens"] + 1], dim=-1).int()
    td["kept_tokens"] = torch.where(td["loss_mask"][..., None], kept, 77)  # what stands outside must not arrive
    for cut in micro_batches(td, 13, packing=packing):
        assert cut.kept_tokens is not None
        assert cut.kept_tokens[:, 0].tolist() == cut.tokens[cut.mask].tolist()
        assert cut.kept_tokens[:, 1].tolist() == (cut.tokens[cut.mask] + 1).tolist()
    spare = empty_micro_batch(td)
    assert spare.kept_tokens is not None
    assert spare.kept_tokens.shape == (0, 2)
