"""Laws of forge/advantages.py, and the golden numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.advantages import ADVANTAGES, advantages, is_degenerate, overlong_penalty
from forge.errors import ConfigError, SchemaError

GOLDEN = Path(__file__).parent / "golden"
KINDS = sorted(set(ADVANTAGES) - {"none"})


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


@pytest.mark.parametrize("kind, key", [("grpo", "grpo_adv"), ("dr_grpo", "drgrpo_adv"), ("rloo", "rloo_adv")])
def test_groups_of_three_and_two_equal_the_golden_numbers(kind: str, key: str) -> None:
    data = golden("algorithms.json")
    rewards = torch.tensor(data["inputs"]["rewards"], dtype=torch.float64)
    expected = torch.tensor(data["outputs"][key], dtype=torch.float64)
    torch.testing.assert_close(advantages(rewards[:3], kind, 3), expected[:3], rtol=0, atol=1e-6)
    torch.testing.assert_close(advantages(rewards[3:5], kind, 2), expected[3:5], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind, key", [("grpo", "adv_grpo"), ("dr_grpo", "adv_drgrpo"), ("rloo", "adv_rloo")])
def test_four_groups_of_four_equal_what_the_public_systems_agree_on(kind: str, key: str) -> None:
    data = golden("losses_and_gradients.json")
    rewards = torch.tensor(data["inputs"]["rewards"])
    expected = torch.tensor(data["expected"][key]["value"])
    torch.testing.assert_close(advantages(rewards, kind, 4), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [0.35, 0.1, 0.7, 0.0, -1e6])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(kind: str, reward: float, size: int, dtype: torch.dtype) -> None:
    rewards = torch.full((size,), reward, dtype=dtype)
    assert bool(is_degenerate(rewards))
    assert advantages(rewards, kind, size).tolist() == [0.0] * size


def test_eight_rewards_of_035_have_a_float_std_that_a_naive_test_would_miss() -> None:
    rewards = torch.full((8,), 0.35)
    assert float(rewards.std()) != 0.0  # why max is compared with min
    assert bool(is_degenerate(rewards))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_degenerate_and_gets_zero(kind: str) -> None:
    assert bool(is_degenerate(torch.tensor([0.7])))
    assert advantages(torch.tensor([0.7, -2.0]), kind, 1).tolist() == [0.0, 0.0]


def test_degeneracy_is_judged_group_by_group() -> None:
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.1, 0.2]])
    assert is_degenerate(rewards).tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_sum_to_zero_and_ignore_a_constant_added_to_all_rewards(kind: str) -> None:
    rewards = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = advantages(rewards, kind, 8)
    torch.testing.assert_close(values.view(4, 8).sum(1), torch.zeros(4).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(advantages(rewards + 5.0, kind, 8), values)


@pytest.mark.parametrize("kind", KINDS)
def test_one_group_does_not_leak_into_another(kind: str) -> None:
    first, second = torch.tensor([1.0, 0.25, 0.5]), torch.tensor([100.0, -100.0, 7.0])
    both = advantages(torch.cat([first, second]), kind, 3)
    torch.testing.assert_close(both, torch.cat([advantages(first, kind, 3), advantages(second, kind, 3)]))


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = torch.tensor([3.0, 1.0, 8.0, 0.0])
    others = torch.stack([torch.cat([rewards[:i], rewards[i + 1 :]]).mean() for i in range(4)])
    torch.testing.assert_close(advantages(rewards, "rloo", 4), rewards - others)


def test_the_dtype_of_the_rewards_is_kept() -> None:
    assert advantages(torch.tensor([0.0, 1.0]), "grpo", 2).dtype == torch.float32


def median_baseline(rewards: Tensor) -> Tensor:
    return rewards - rewards.median(dim=-1, keepdim=True).values


def test_an_own_kind_is_one_registered_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVANTAGES, "median", median_baseline)
    assert advantages(torch.tensor([0.0, 1.0, 5.0]), "median", 3).tolist() == [-1.0, 0.0, 4.0]


def test_an_own_kind_can_be_named_by_its_path() -> None:
    rewards = torch.tensor([0.0, 1.0, 5.0])
    assert torch.equal(advantages(rewards, "forge.advantages:rloo", 3), advantages(rewards, "rloo", 3))


def test_none_gives_the_rewards_themselves_whatever_the_group() -> None:
    rewards = torch.tensor([0.35, 0.35, -1.0])
    for size in (1, 3):
        assert torch.equal(advantages(rewards, "none", size), rewards)
    equal = torch.full((4,), 0.5)
    assert advantages(equal, "none", 4).data_ptr() != equal.data_ptr()
    assert torch.equal(advantages(equal, "none", 4), equal)


def test_an_unknown_kind_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.advantage is 'gpro'.*dr_grpo, grpo, none, rloo"):
        advantages(torch.zeros(2), "gpro", 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(SchemaError, match=r"rewards\[1\] is (nan|inf)"):
        advantages(torch.tensor([0.0, bad]), "grpo", 2)


def test_rewards_that_do_not_divide_into_groups_are_an_error() -> None:
    with pytest.raises(SchemaError, match=r"\[5\].*multiple of 2"):
        advantages(torch.zeros(5), "grpo", 2)
    with pytest.raises(ConfigError, match="group_size must be >= 1, got 0"):
        advantages(torch.zeros(4), "grpo", 0)


# Overlong shaping


def test_the_overlong_penalty_equals_the_golden_number() -> None:
    assert float(overlong_penalty(torch.tensor([17000]), 20480, 4096)) == pytest.approx(-0.1503906, abs=1e-6)


def test_the_overlong_penalty_falls_from_zero_at_the_buffer_to_the_factor_at_the_budget() -> None:
    got = overlong_penalty(torch.tensor([0, 60, 80, 90, 100]), 100, 20, factor=2.0)
    assert got.tolist() == [0.0, 0.0, 0.0, -1.0, -2.0]


@pytest.mark.parametrize("buffer", [0, 101])
def test_an_overlong_buffer_outside_the_budget_is_an_error(buffer: int) -> None:
    with pytest.raises(ConfigError, match=rf"buffer must lie in \[1, 100\], got {buffer}"):
        overlong_penalty(torch.tensor([5]), 100, buffer)
