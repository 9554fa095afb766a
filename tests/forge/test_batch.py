"""Laws of forge/batch.py: what a Group and a Batch hold, and what check_batch refuses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from forge.batch import EPISODE_KEYS, TOKEN_KEYS, check_batch, collate, make_group, oldest_version
from forge.errors import SchemaError


def group(lengths: list[int], *, prompt: int = 2, group_id: int = 0, version: int = 0, pad_id: int = 0) -> TensorDict:
    """A group whose completion g has `lengths[g]` tokens: 100 * g + 1, 100 * g + 2, ..."""
    return make_group(
        list(range(10, 10 + prompt)),
        [[100 * g + i + 1 for i in range(n)] for g, n in enumerate(lengths)],
        [[-0.5 - i for i in range(n)] for n in lengths],
        [[version + i for i in range(n)] for n in lengths],
        group_id=group_id,
        pad_id=pad_id,
    )


def test_a_group_holds_prompt_completion_and_padding_where_the_schema_says() -> None:
    td = group([3, 1, 0], pad_id=9, group_id=7, version=4)
    check_batch(td)
    assert td["tokens"].tolist() == [[10, 11, 1, 2, 3], [10, 11, 101, 9, 9], [10, 11, 9, 9, 9]]
    assert td["loss_mask"].int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert td["behavior_logprobs"].tolist() == [[0, 0, -0.5, -1.5, -2.5], [0, 0, -0.5, 0, 0], [0.0] * 5]
    assert td["token_versions"].tolist() == [[-1, -1, 4, 5, 6], [-1, -1, 4, -1, -1], [-1] * 5]
    assert td["lengths"].tolist() == [5, 3, 2]
    assert td["group_id"].tolist() == [7, 7, 7]
    assert td["rewards"].tolist() == td["advantages"].tolist() == [0.0, 0.0, 0.0]


def test_rewards_and_advantages_do_not_share_memory() -> None:
    td = group([1, 1])
    td["rewards"].fill_(1.0)
    assert td["advantages"].tolist() == [0.0, 0.0]


def test_a_pad_id_that_is_also_a_sampled_token_is_trained_where_it_was_sampled() -> None:
    """The end token is often the pad token: the mask, not the id, says what is trained."""
    td = make_group([5], [[3, 9], [9]], [[-1.0, -2.0], [-3.0]], [[0, 0], [0]], group_id=0, pad_id=9)
    assert td["loss_mask"].int().tolist() == [[0, 1, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (([], [[1]], [[-1.0]], [[0]]), "the prompt has 0 tokens"),
        (([1], [], [], []), "the group has 0 completions"),
        (([1], [[1, 2]], [[-1.0]], [[0, 0]]), r"logprobs has lengths \[1\], completions \[2\]"),
        (([1], [[1, 2]], [[-1.0, -1.0]], [[0]]), r"versions has lengths \[1\], completions \[2\]"),
        (([1], [[1], [2]], [[-1.0]], [[0], [0]]), r"logprobs has lengths \[1\], completions \[1, 1\]"),
    ],
)
def test_a_group_of_parts_that_do_not_fit_is_refused(arguments: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        make_group(*arguments, group_id=0)


# Collating


def test_collated_groups_keep_every_episode_and_pad_on_the_right() -> None:
    groups = [group([3, 1], group_id=1), group([0, 6], prompt=4, group_id=2)]
    batch = collate(groups, pad_id=9)
    check_batch(batch)
    assert batch.batch_size == torch.Size([4])
    assert batch["tokens"].shape == (4, 10)
    assert batch["group_id"].tolist() == [1, 1, 2, 2]
    for row, (td, g) in enumerate([(groups[0], 0), (groups[0], 1), (groups[1], 0), (groups[1], 1)]):
        length = int(td["lengths"][g])
        for key in TOKEN_KEYS:
            assert torch.equal(batch[key][row, :length], td[key][g, :length])
        for key in EPISODE_KEYS:
            assert torch.equal(batch[key][row], td[key][g])
    assert batch["tokens"][0, 5:].tolist() == [9] * 5
    assert batch["token_versions"][0, 5:].tolist() == [-1] * 5
    assert not bool(batch["loss_mask"][0, 5:].any())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=5))
def test_collating_loses_no_token_and_invents_none(lengths: list[list[int]]) -> None:
    batch = collate([group(row, prompt=1 + i, group_id=i) for i, row in enumerate(lengths)])
    check_batch(batch)
    assert int(batch["loss_mask"].sum()) == sum(map(sum, lengths))
    assert batch["tokens"].shape[1] == int(batch["lengths"].max())
    assert batch["lengths"].tolist() == [1 + i + n for i, row in enumerate(lengths) for n in row]


def test_padding_wider_than_the_longest_episode_is_cut() -> None:
    batch = collate([group([3, 30])])
    assert collate([batch[:1]])["tokens"].shape == (1, 5)


def test_a_batch_is_a_copy_and_pickles_without_its_group() -> None:
    whole = group([400] * 64)
    batch = collate([whole[:1]])
    assert batch["tokens"].untyped_storage().data_ptr() != whole["tokens"].untyped_storage().data_ptr()
    assert len(pickle.dumps(batch["tokens"])) < 10_000


def test_no_groups_make_no_batch() -> None:
    with pytest.raises(SchemaError, match="collate got 0 groups"):
        collate([])


def test_reference_logprobs_are_carried_by_all_groups_or_by_none() -> None:
    with_ref, without = group([2, 1]), group([2, 1])
    with_ref["ref_logprobs"] = torch.where(with_ref["loss_mask"], -1.0, 0.0)
    batch = collate([with_ref, with_ref])
    check_batch(batch)
    assert batch["ref_logprobs"].sum() == -6.0
    assert "ref_logprobs" not in collate([without, without])
    with pytest.raises(SchemaError, match="ref_logprobs is in 1 of 2 groups"):
        collate([with_ref, without])


def test_version_257_survives_whatever_is_cast() -> None:
    """bfloat16 has no 257: a batch that is cast as a whole would train on version 256."""
    batch = collate([group([1], version=257)])
    assert int(batch["token_versions"].max()) == 257
    assert batch["token_versions"].bfloat16().max() == 256.0
    with pytest.raises(SchemaError, match=r"has dtype torch\.bfloat16, expected torch\.int64"):
        check_batch(batch.to(torch.bfloat16))


# Versions


def test_the_oldest_version_counts_only_what_is_trained() -> None:
    td = collate([group([2], version=5), group([3], version=3)])
    assert oldest_version(td) == 3
    td["token_versions"][~td["loss_mask"]] = 0
    assert oldest_version(td) == 3


def test_the_oldest_version_of_nothing_is_minus_one() -> None:
    assert oldest_version(group([0, 0])) == -1


# What check_batch refuses


def broken(key: str, value: Any) -> TensorDict:
    td = group([3, 1])
    td[key] = value
    return td


def changed(key: str, index: tuple[int, ...], value: Any) -> TensorDict:
    td = group([3, 1])
    td[key][index] = value
    return td


@pytest.mark.parametrize(
    "td, text",
    [
        (group([3, 1]).exclude("rewards"), "rewards is missing; a batch holds"),
        (broken("loss_mask", torch.zeros(2, 5)), r"loss_mask has dtype torch\.float32, expected torch\.bool"),
        (
            broken("behavior_logprobs", torch.zeros(2, 4)),
            r"behavior_logprobs has shape \[2, 4\], expected \[2, 5\]",
        ),
        (broken("rewards", torch.zeros(2, 1)), r"rewards has shape \[2, 1\], expected \[2\]"),
        (broken("tokens", torch.zeros(2, dtype=torch.int64)), r"tokens has shape \[2\], expected \[B, T\]"),
        (
            broken("tokens", torch.zeros(2, 0, dtype=torch.int64)),
            r"tokens has shape \[2, 0\], expected \[B, T\]",
        ),
        (broken("ref_logprobs", torch.zeros(2, 5).double()), r"ref_logprobs has dtype torch\.float64"),
        (changed("loss_mask", (0, 0), True), "loss_mask is set at position 0"),
        (changed("loss_mask", (1, 3), True), "loss_mask is set beyond lengths"),
        (changed("lengths", (0,), 6), r"lengths must lie in \[1, 5\], got \[6, 3\]"),
        (changed("lengths", (0,), 0), r"lengths must lie in \[1, 5\], got \[0, 3\]"),
        (changed("token_versions", (0, 3), -1), "token_versions is negative under loss_mask"),
        (changed("behavior_logprobs", (0, 2), -torch.inf), "behavior_logprobs under loss_mask holds -inf"),
        (changed("rewards", (1,), torch.nan), "rewards holds nan"),
        (changed("advantages", (0,), torch.inf), "advantages holds inf"),
        (group([3, 1]).reshape(2, 1), r"batch_size is \[2, 1\], expected one dimension"),
    ],
)
def test_a_batch_that_breaks_the_schema_is_refused_by_key(td: TensorDict, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        check_batch(td)


def test_what_stands_outside_the_mask_is_not_checked() -> None:
    """Nothing reads it: a reference may leave whatever it computed for prompt and padding."""
    td = group([3, 1])
    td["behavior_logprobs"][~td["loss_mask"]] = torch.nan
    td["token_versions"][~td["loss_mask"]] = -7
    check_batch(td)


def test_an_empty_batch_follows_the_schema() -> None:
    check_batch(group([3, 1])[:0])
