"""Laws of forge/token_advantages.py: golden numbers, holes in masks, rewards of turns, whitening across cuts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.advantages import advantages
from forge.errors import ConfigError, SchemaError
from forge.token_advantages import (
    TOKEN_ADVANTAGES,
    TokenRewards,
    episode_rewards,
    gae,
    kl_penalised,
    merge_moments,
    moments,
    reinforce_pp,
    spread,
    turn_rewards,
    whiten,
)

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def as_float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_row(rewards: list[float], mask: list[int], **others: Any) -> TokenRewards:
    if "values" in others:
        others["values"] = as_float64([others["values"]])
    return TokenRewards(rewards=as_float64([rewards]), loss_mask=torch.tensor([mask]).bool(), **others)


def random_rewards(rows: int = 8, width: int = 30, **others: Any) -> TokenRewards:
    g = torch.Generator().manual_seed(1)
    mask = torch.rand((rows, width), generator=g) > 0.4
    mask[-1] = False
    draw = torch.randn((2, rows, width), generator=g, dtype=torch.float64)
    return TokenRewards(rewards=draw[0], values=draw[1], loss_mask=mask, gamma=0.9, lam=0.8, **others)


# Golden numbers


def test_reinforce_pp_equals_the_golden_numbers() -> None:
    data = golden("algorithms.json")
    mask = torch.tensor(data["inputs"]["mask"]).bool()
    rewards = episode_rewards(as_float64(data["inputs"]["rewards"]), mask)
    white = whiten(reinforce_pp(TokenRewards(rewards=rewards, loss_mask=mask)), mask)
    torch.testing.assert_close(white[0], as_float64(data["outputs"]["rpp_adv_row0"]), rtol=0, atol=1e-6)


def test_gae_equals_what_the_public_systems_agree_on() -> None:
    data = golden("losses_and_gradients.json")
    mask = torch.tensor(data["inputs"]["mask"]).bool()
    values = torch.linspace(0, 1, mask.numel(), dtype=torch.float64).view(mask.shape) * mask
    rewards = episode_rewards(as_float64(data["inputs"]["rewards"]), mask)
    params = data["params"]["gae"]
    x = TokenRewards(rewards=rewards, loss_mask=mask, values=values, gamma=params["gamma"], lam=params["lam"])
    expected = as_float64(data["expected"]["adv_gae_all"]["value"])
    torch.testing.assert_close(whiten(gae(x), mask)[mask], expected[mask], rtol=0, atol=1e-6)


# By hand


def test_a_return_is_carried_unchanged_across_holes() -> None:
    x = one_row([1.0, 50.0, 2.0, 4.0, 50.0], [1, 0, 1, 1, 0], gamma=0.5)
    assert reinforce_pp(x).tolist() == [[1.0 + 0.5 * (2.0 + 0.5 * 4.0), 0.0, 4.0, 4.0, 0.0]]


def test_gae_by_hand_with_a_hole() -> None:
    x = one_row([0.0, 9.0, 1.0], [1, 0, 1], values=[0.5, 7.0, 0.25], gamma=0.9, lam=0.8)
    last = 1.0 - 0.25
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    torch.testing.assert_close(gae(x), as_float64([[first, 0.0, last]]))


def test_gae_without_decay_is_the_return_less_the_value() -> None:
    x = replace(random_rewards(), lam=1.0)
    assert x.values is not None
    expected = torch.where(x.loss_mask, reinforce_pp(x) - x.values, 0.0)
    torch.testing.assert_close(gae(x), expected)


@pytest.mark.parametrize("kind", TOKEN_ADVANTAGES)
def test_removing_the_holes_changes_nothing(kind: str) -> None:
    x = random_rewards()
    assert x.values is not None
    full = TOKEN_ADVANTAGES[kind](x)
    rows = [(x.rewards[i][m], x.values[i][m]) for i, m in enumerate(x.loss_mask)]
    dense = [torch.nn.utils.rnn.pad_sequence([row[j] for row in rows], batch_first=True) for j in (0, 1)]
    lengths = x.loss_mask.sum(1)
    mask = torch.arange(dense[0].shape[1]) < lengths[:, None]
    packed = TOKEN_ADVANTAGES[kind](replace(x, rewards=dense[0], values=dense[1], loss_mask=mask))
    torch.testing.assert_close(packed[mask], full[x.loss_mask])


@pytest.mark.parametrize("kind", TOKEN_ADVANTAGES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_stands_outside_the_mask_is_not_read(kind: str, poison: float) -> None:
    x = random_rewards()
    assert x.values is not None
    dirty = replace(
        x,
        rewards=torch.where(x.loss_mask, x.rewards, poison),
        values=torch.where(x.loss_mask, x.values, poison),
    )
    got = TOKEN_ADVANTAGES[kind](dirty)
    assert torch.equal(got, TOKEN_ADVANTAGES[kind](x))
    assert bool((got[~x.loss_mask] == 0).all())
    assert torch.equal(whiten(torch.where(x.loss_mask, got, poison), x.loss_mask), whiten(got, x.loss_mask))


@pytest.mark.parametrize("kind", TOKEN_ADVANTAGES)
def test_a_batch_with_nothing_to_train_gives_zeros(kind: str) -> None:
    x = random_rewards()
    x = replace(x, loss_mask=torch.zeros_like(x.loss_mask), rewards=torch.full_like(x.rewards, float("nan")))
    got = TOKEN_ADVANTAGES[kind](x)
    assert got.tolist() == torch.zeros_like(got).tolist()
    assert whiten(got, x.loss_mask).tolist() == got.tolist()


# Rewards of episodes, turns, and the KL divergence


def test_what_the_tokens_did_not_earn_themselves_is_at_the_last_one() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    earned = torch.full((3, 5), 0.5)
    earned[0, 2] = float("nan")
    got = spread(torch.tensor([2.0, 2.5, 4.0]), mask, earned)
    assert got.tolist() == [[0.0, 0.5, 0.0, 1.5, 0.0], [0.5] * 5, [0.0] * 5]
    plain = torch.tensor([2.0, 3.0, 4.0])
    assert torch.equal(spread(plain, mask), episode_rewards(plain, mask))


def test_the_baseline_variant_carries_the_advantage_of_the_group_to_every_token() -> None:
    mask = random_rewards().loss_mask
    rewards = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    centred = advantages(rewards, "dr_grpo", 4)
    x = TokenRewards(rewards=spread(centred, mask), loss_mask=mask)
    torch.testing.assert_close(reinforce_pp(x), centred[:, None].expand(8, 30) * mask)


def test_the_reward_of_an_episode_is_at_its_last_policy_token() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    got = episode_rewards(torch.tensor([2.0, 3.0, 4.0]), mask)
    assert got.tolist() == [[0, 0, 0, 2, 0], [0, 0, 0, 0, 3], [0, 0, 0, 0, 0]]


def test_the_reward_of_a_turn_is_at_its_last_policy_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0]]).bool()
    got = turn_rewards(torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]), mask)
    assert got.tolist() == [[0, 0, 1, 0, 2, 0, 3], [0, 4, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("rewards", [[[1.0]], [[1.0, 2.0, 3.0]]])
def test_rewards_that_fit_no_turn_are_an_error(rewards: list[list[float]]) -> None:
    with pytest.raises(SchemaError, match=r"turns, the episodes have \[2\]"):
        turn_rewards(torch.tensor(rewards), torch.tensor([[True, False, True]]))


@pytest.mark.parametrize("estimator, kl", [("k1", 0.5), ("k2", 0.125), ("k3", 0.5 - 1.0 + 0.60653066)])
def test_a_kl_in_the_reward_is_taken_from_every_policy_token(estimator: str, kl: float) -> None:
    mask = torch.tensor([[True, False, True]])
    logprobs = torch.tensor([[-1.0, float("nan"), -1.0]], requires_grad=True)
    got = kl_penalised(
        torch.tensor([[0.0, 7.0, 1.0]]),
        mask,
        logprobs,
        torch.tensor([[-1.5, 3.0, -1.0]]),
        weight=0.1,
        estimator=estimator,
    )
    assert got[0].tolist() == pytest.approx([-0.1 * kl, 0.0, 1.0])
    assert not got.requires_grad


# Whitening


def test_whitened_values_have_mean_zero_and_variance_one_over_policy_tokens() -> None:
    x = random_rewards()
    white = whiten(x.rewards, x.loss_mask)[x.loss_mask]
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(white.var()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e7])
def test_whitening_by_merged_moments_is_whitening_the_whole_batch(offset: float) -> None:
    x = random_rewards()
    values = x.rewards + offset
    parts = [[0, 1], [2], [7], [3, 4, 5, 6]]
    merged = merge_moments([moments(values[p], x.loss_mask[p]) for p in parts])
    whole = whiten(values, x.loss_mask)
    for part in parts:
        torch.testing.assert_close(whiten(values[part], x.loss_mask[part], merged), whole[part], rtol=0, atol=1e-7)


def test_one_token_alone_is_whitened_to_zero() -> None:
    assert whiten(torch.tensor([[3.0]]), torch.tensor([[True]])).tolist() == [[0.0]]


def test_the_dtype_of_the_rewards_is_kept() -> None:
    x = random_rewards()
    low = replace(x, rewards=x.rewards.float())
    for kind in TOKEN_ADVANTAGES.values():
        assert kind(low).dtype == torch.float32
    assert whiten(low.rewards, x.loss_mask).dtype == torch.float32


# What a user gets wrong


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"gamma": 1.1}, ConfigError, r"gamma must lie in \[0, 1\], got 1\.1"),
        ({"lam": -0.1}, ConfigError, r"lam must lie in \[0, 1\], got -0\.1"),
        ({"rewards": torch.zeros(8)}, SchemaError, r"rewards has shape \[8\], loss_mask \[8, 30\]"),
        ({"values": torch.zeros(8, 1)}, SchemaError, r"values has shape \[8, 1\]"),
        ({"loss_mask": torch.ones(8, 30)}, SchemaError, r"expected bool"),
    ],
)
@pytest.mark.parametrize("kind", TOKEN_ADVANTAGES)
def test_an_input_that_cannot_work_is_refused_by_name(
    kind: str, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        TOKEN_ADVANTAGES[kind](replace(random_rewards(), **changes))


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(SchemaError, match=r"rewards\[0, 1\] is nan"):
        reinforce_pp(one_row([0.0, float("nan")], [1, 1]))


def test_gae_without_a_critic_says_so() -> None:
    with pytest.raises(SchemaError, match=r"values is missing; loss\.token_advantages gae needs a critic"):
        gae(one_row([1.0], [1]))
