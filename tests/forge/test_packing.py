"""Laws of the two forms of a batch: nothing is lost between them, and a packed batch keeps its schema."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from forge import channel
from forge.batch import EPISODE_KEYS, check_batch, check_packed, collate, is_packed, make_group
from forge.errors import SchemaError
from forge.packing import (
    first_fit,
    flatten,
    pack,
    pad,
    padded_cuts,
    padded_size,
    row_episodes,
)


def group(lengths: list[int], *, prompt: int = 2, group_id: int = 0, version: int = 0) -> TensorDict:
    """A group whose completion g has `lengths[g]` tokens: 100 * g + 1, 100 * g + 2, ..."""
    td = make_group(
        list(range(10, 10 + prompt)),
        [[100 * g + i + 1 for i in range(n)] for g, n in enumerate(lengths)],
        [[-0.5 - i for i in range(n)] for n in lengths],
        [[version + i for i in range(n)] for n in lengths],
        group_id=group_id,
    )
    td["rewards"] = torch.arange(len(lengths)).float()
    td["advantages"] = -torch.arange(len(lengths)).float()
    return td


def packed(groups: list[TensorDict], max_tokens: int) -> TensorDict:
    flat = [flatten(td) for td in groups]
    return pack(flat, first_fit([n for td in flat for n in td["lengths"].tolist()], max_tokens))


ragged = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=5)


def supports(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[..., 3]`: of every third trained token none, of the others the token itself and half the time one more."""
    kept = torch.stack([tokens, torch.where(tokens % 2 == 0, tokens + 1, -1), torch.full_like(tokens, -1)], dim=-1)
    return kept.masked_fill(~(mask & (tokens % 3 > 0))[..., None], -1).int()


def made(lengths: list[list[int]], *, reference: bool = False) -> list[TensorDict]:
    groups = [group(row, prompt=1 + i, group_id=i, version=i) for i, row in enumerate(lengths)]
    if reference:
        for td in groups:
            td["ref_logprobs"] = torch.where(td["loss_mask"], -3.0, 0.0)
            td["kept_tokens"] = supports(td["tokens"], td["loss_mask"])
    return groups


@settings(max_examples=50, deadline=None)
@given(ragged, st.integers(1, 30), st.booleans())
def test_packing_loses_no_token_and_invents_none(lengths: list[list[int]], max_tokens: int, reference: bool) -> None:
    groups = made(lengths, reference=reference)
    td = packed(groups, max_tokens)
    check_packed(td)
    order = [episode for row in row_episodes(td) for episode in row]
    assert order == list(range(len(order)))
    back, whole = pad([td]), collate(groups)
    check_batch(back)
    rows = first_fit(whole["lengths"].tolist(), max_tokens)
    expected = whole[torch.tensor([episode for row in rows for episode in row])]
    assert set(back.keys()) == set(expected.keys())
    for key in expected.keys():  # noqa: SIM118
        assert torch.equal(back[key], expected[key]), key


@settings(max_examples=50, deadline=None)
@given(ragged)
def test_flat_episodes_hold_no_padding_and_come_back_the_same(lengths: list[list[int]]) -> None:
    whole = collate(made(lengths))
    flat = flatten(whole)
    assert is_packed(flat)
    assert flat["tokens"].shape[0] == int(whole["lengths"].sum())
    back = pad([flat])
    for key in whole.keys():  # noqa: SIM118
        assert torch.equal(back[key], whole[key]), key


def test_flat_episodes_own_their_memory() -> None:
    td = group([3, 3])
    flat = flatten(td)
    for key in td.keys():  # noqa: SIM118
        before = flat[key].clone()
        td[key].zero_()
        assert torch.equal(flat[key], before), key


def test_nothing_from_outside_the_mask_gets_into_the_flat_form() -> None:
    td = group([3, 1])
    td["ref_logprobs"] = torch.where(td["loss_mask"], -3.0, torch.nan)
    td["behavior_logprobs"][~td["loss_mask"]] = torch.nan
    td["token_versions"][~td["loss_mask"]] = 7
    flat = flatten(td)
    assert flat["behavior_logprobs"].tolist() == [0, 0, -0.5, -1.5, -2.5, 0, 0, -0.5]
    assert flat["ref_logprobs"].tolist() == [0, 0, -3, -3, -3, 0, 0, -3]
    assert flat["token_versions"].tolist() == [-1, -1, 0, 1, 2, -1, -1, 0]


def test_positions_sequences_and_rows_say_where_each_episode_lies() -> None:
    td = packed([group([3, 1]), group([2])], 7)
    assert td["lengths"].tolist() == [5, 4, 3]
    assert td["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert td["sequence_ids"].tolist() == [0] * 5 + [1] * 4 + [2] * 3
    assert td["row_offsets"].tolist() == [0, 5, 12]
    assert row_episodes(td) == [[0], [1, 2]]


def test_packed_episodes_are_packed_again() -> None:
    td = packed([group([3, 1]), group([2])], 7)
    again = pack([td], first_fit(td["lengths"].tolist(), 5))
    check_packed(again)
    assert again["row_offsets"].tolist() == [0, 5, 9, 12]
    assert torch.equal(pad([again])["tokens"], pad([td])["tokens"])


def test_what_is_in_no_row_is_left_out() -> None:
    flat = flatten(group([3, 1, 2]))
    td = pack([flat], [[2], [0]])
    check_packed(td)
    assert td["rewards"].tolist() == [2, 0]
    assert td["tokens"].tolist() == [10, 11, 201, 202, 10, 11, 1, 2, 3]


def test_a_packed_batch_made_in_the_memory_of_the_channel_is_sent_without_a_copy() -> None:
    flat = flatten(group([300] * 8))
    pool = channel.Pool()
    td = pack([flat], first_fit(flat["lengths"].tolist(), 1024), pool.alloc)
    check_packed(td)
    handle = pool.put(td)
    got = pool.open(handle)
    td["tokens"][0] = 77
    assert got["tokens"][0] == 77
    del td, got
    pool.shutdown()


def test_reference_logprobs_are_carried_by_all_groups_or_by_none() -> None:
    with_ref, without = made([[1, 2]], reference=True)[0], group([1, 2])
    flat = [flatten(with_ref), flatten(without)]
    with pytest.raises(SchemaError, match="ref_logprobs is in 1 of 2 groups"):
        pack(flat, [[0, 1, 2, 3]])


# Rows


lists_of_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lists_of_lengths, st.integers(1, 60))
def test_first_fit_keeps_the_budget_unless_one_episode_alone_breaks_it(lengths: list[int], max_tokens: int) -> None:
    rows = first_fit(lengths, max_tokens)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= max_tokens or len(row) == 1 for row in rows)
    fitting = [row for row in rows if sum(lengths[i] for i in row) <= max_tokens]
    loads = sorted(sum(lengths[i] for i in row) for row in fitting)
    assert all(a + b > max_tokens for a, b in pairwise(loads)), "two rows would fit into one"


@given(lists_of_lengths, st.integers(60, 300))
def test_padded_cuts_keep_the_budget_padding_included(lengths: list[int], max_tokens: int) -> None:
    cuts = padded_cuts(lengths, max_tokens)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    assert all(max(lengths[i] for i in cut) * len(cut) <= max_tokens for cut in cuts)


def test_the_size_of_padded_cuts_counts_padding() -> None:
    lengths = [10, 6, 4, 4]
    assert padded_cuts(lengths, 16) == [[0], [1, 2], [3]]
    assert padded_size(lengths, 16) == 10 + 12 + 4


# What check_packed refuses


def changed(key: str, index: Any, value: Any) -> TensorDict:
    td = packed([group([3, 1]), group([2])], 7)
    td[key][index] = value
    return td


def replaced(key: str, value: Any) -> TensorDict:
    td = packed([group([3, 1]), group([2])], 7)
    td[key] = value
    return td


@pytest.mark.parametrize(
    "td, text",
    [
        (group([3, 1]), r"batch_size is \[2\], a packed batch has none"),
        (flatten(group([3, 1])), "position_ids is missing"),
        (changed("lengths", 0, 0), r"lengths \[0, 4, 3\] must be >= 1 and add up to the 12 tokens"),
        (changed("lengths", 0, 6), "must be >= 1 and add up"),
        (changed("loss_mask", 5, True), "loss_mask is set at the first token of an episode"),
        (changed("position_ids", 5, 5), "position_ids must count from 0"),
        (changed("sequence_ids", 4, 1), "sequence_ids must number the episodes"),
        (changed("row_offsets", 1, 6), r"row_offsets must lie between episodes, got \[0, 6, 12\]"),
        (changed("row_offsets", 1, 12), r"row_offsets must rise from 0 to 12, got \[0, 12, 12\]"),
        (changed("row_offsets", 2, 9), r"row_offsets must rise from 0 to 12"),
        (changed("row_offsets", 0, 5), r"row_offsets must rise from 0 to 12"),
        (replaced("row_offsets", torch.zeros(0, dtype=torch.int64)), r"row_offsets must rise from 0 to 12"),
        (replaced("sequence_ids", torch.zeros(12, dtype=torch.int64)), r"sequence_ids has dtype torch\.int64"),
        (replaced("loss_mask", torch.zeros(11, dtype=torch.bool)), r"loss_mask has shape \[11\], expected \[12\]"),
        (replaced("rewards", torch.zeros(12)), r"rewards has shape \[12\], expected \[3\]"),
        (changed("token_versions", 3, -1), "token_versions is negative under loss_mask"),
        (changed("behavior_logprobs", 3, torch.nan), "behavior_logprobs under loss_mask holds nan"),
        (changed("advantages", 0, torch.inf), "advantages holds inf"),
    ],
)
def test_a_packed_batch_that_breaks_the_schema_is_refused_by_key(td: TensorDict, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        check_packed(td)


def test_the_keys_of_a_batch_are_those_of_the_schema() -> None:
    td = group([2])
    td["extra"] = torch.zeros(1)
    assert "extra" not in flatten(td)
    assert set(EPISODE_KEYS) < set(flatten(td).keys())


# Episodes that stay together


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 100), st.sampled_from([2, 3]))
def test_runs_stay_together_in_every_cut(lengths: list[int], max_tokens: int, together: int) -> None:
    lengths = [n for n in lengths for _ in range(together)]
    for cut in (first_fit, padded_cuts):
        rows = cut(lengths, max_tokens, together)
        assert sorted(episode for row in rows for episode in row) == list(range(len(lengths)))
        starts = [row[i : i + together] for row in rows for i in range(0, len(row), together)]
        assert all(run == list(range(run[0], run[0] + together)) and run[0] % together == 0 for run in starts)
    sizes = [sum(lengths[i] for i in row) for row in first_fit(lengths, max_tokens, together)]
    assert all(size <= max_tokens or len(row) == together for size, row in zip(sizes, rows, strict=False))
    cuts = padded_cuts(lengths, max_tokens, together)
    sizes = [max(lengths[i] for i in cut) * len(cut) for cut in cuts]
    assert all(size <= max_tokens or len(cut) == together for size, cut in zip(sizes, cuts, strict=True))
    assert padded_size(lengths, max_tokens, together) == sum(sizes)


def test_a_torn_run_is_an_error() -> None:
    with pytest.raises(SchemaError, match=r"3 episodes are no multiple of 2"):
        first_fit([1, 2, 3], 10, together=2)


# What is wide: more than a number a token


def with_supports(lengths: list[int], size: int, **arguments: Any) -> TensorDict:
    """A group whose tokens have supports of themselves alone, in rows of `size`."""
    td = group(lengths, **arguments)
    kept = torch.full((*td["tokens"].shape, size), -1, dtype=torch.int32)
    kept[..., 0] = torch.where(td["loss_mask"], td["tokens"], -1)
    td["kept_tokens"] = kept
    return td


def test_supports_travel_with_their_tokens_into_shared_memory_and_back() -> None:
    groups = [with_supports([3, 1], 4), with_supports([2, 2], 4, group_id=1)]
    flat = [flatten(td) for td in groups]
    assert [td["kept_tokens"].shape for td in flat] == [(8, 4), (8, 4)]
    out = channel.take(channel.put(pack(flat, [[3, 0], [1]], channel.alloc)))
    check_packed(out)
    assert out["kept_tokens"].shape == (12, 4)
    own = torch.where(out["loss_mask"], out["tokens"], -1)
    assert torch.equal(out["kept_tokens"][:, 0].long(), own)
    assert int(out["kept_tokens"][:, 1:].max()) == -1
    assert torch.equal(pad(flat)["kept_tokens"], collate(groups)["kept_tokens"])


def test_what_stands_outside_the_mask_of_supports_is_put_in_order() -> None:
    td = with_supports([3, 1], 2)
    expected = flatten(td)["kept_tokens"]
    td["kept_tokens"][~td["loss_mask"]] = 77
    assert torch.equal(flatten(td)["kept_tokens"], expected)


@pytest.mark.parametrize("join", [pad, collate, lambda flat: pack(flat, [[0], [1]])], ids=["pad", "collate", "pack"])
def test_supports_of_several_widths_or_of_some_groups_only_are_refused(join: Any) -> None:
    groups = [with_supports([3], 2), with_supports([3], 4), group([3])]
    given = groups if join is collate else [flatten(td) for td in groups]
    with pytest.raises(SchemaError, match=r"kept_tokens has shapes \[\(2,\), \(4,\)\] of a token"):
        join(given[:2])
    with pytest.raises(SchemaError, match="kept_tokens is in 1 of 2 groups"):
        join(given[1:])
