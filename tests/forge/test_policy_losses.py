"""Laws of forge/policy_losses.py: golden values and gradients, derivatives, and one gradient however a step is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import (
    ALGORITHMS,
    GRADIENTS,
    WITH_GRADIENT,
    WITH_VALUE,
    assert_golden,
    forward_input,
    gradient_input,
    make_config,
    random_input,
    rows_of,
    run,
    value_and_grad,
)
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad as widen

from forge.corrections import CORRECTIONS
from forge.loss_input import needs_of
from forge.losses import AGGREGATIONS, LOSSES, LossInput, add_metrics, compute_loss, denominator, metric_means
from forge.packing import pack, pad
from forge.policy_losses import clipped_value_loss

SINGLE = [name for name, loss in LOSSES.items() if needs_of(loss).together == 1]
"""Losses of one episode; those of pairs are in test_preference_losses.py."""
EVERY = [
    (name, correction)
    for name in SINGLE
    for correction in ("none", *CORRECTIONS)
    if name != "decoupled_ppo" or correction == "none"
]
each_loss = pytest.mark.parametrize("name, correction", EVERY, ids=["-".join(pair) for pair in EVERY])


def wide_limits(name: str, correction: str, aggregation: str = "token_mean", **changes: Any) -> Any:
    """Limits between which some sequences of `random_input` lie and some do not."""
    limits: dict[str, Any] = {}
    if correction in ("seq_mask", "geo_mask", "icepop"):
        limits = {"weight_low": 0.8, "weight_high": 1.25}
    return make_config(aggregation, name=name, correction=correction, **limits, **changes)


# Golden numbers


@pytest.mark.parametrize("key, aggregation, changes, three_policies", WITH_VALUE)
def test_a_loss_equals_the_golden_value(
    key: str, aggregation: str, changes: dict[str, Any], three_policies: bool
) -> None:
    cfg = make_config(aggregation, **changes)
    cfg.validate()
    got = float(run(forward_input(three_policies=three_policies), cfg).loss)
    assert got == pytest.approx(ALGORITHMS["outputs"][key], abs=1e-6)


@pytest.mark.parametrize("key, aggregation, changes, three_policies", WITH_GRADIENT)
def test_a_loss_equals_the_golden_value_and_gradient(
    key: str, aggregation: str, changes: dict[str, Any], three_policies: bool
) -> None:
    cfg = make_config(aggregation, **changes)
    cfg.validate()
    assert_golden(value_and_grad(gradient_input(three_policies=three_policies), cfg), key)


def test_every_golden_gradient_is_held_against_a_loss() -> None:
    with_gradient = {key for key, value in GRADIENTS["expected"].items() if value["grad_new"] is not None}
    assert with_gradient == {case[0] for case in WITH_GRADIENT} | {"k3"}


# Derivatives


def surrogate(x: LossInput, cfg: Any) -> Any:
    """The loss as a function of log-probs for which autograd and differences agree: what is detached stays put."""
    frozen = x.policy_logprobs
    if cfg.name == "reverse_kl":
        assert x.ref_logprobs is not None
        x, cfg = replace(x, advantages=x.ref_logprobs - frozen), replace(cfg, name="ppo_clip")
    elif cfg.name == "cispo":
        weight = (frozen - x.behavior_logprobs).exp().clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
        x, cfg = replace(x, advantages=weight * x.advantages[:, None]), replace(cfg, name="reinforce")
    elif cfg.name == "gspo":
        # PPO clip on the ratio s exp(policy - frozen), s held still.
        gap = torch.where(x.loss_mask, frozen - x.behavior_logprobs, 0.0)
        mean = gap.sum(1, keepdim=True) / x.loss_mask.sum(1, keepdim=True).clamp(min=1)
        x, cfg = replace(x, behavior_logprobs=frozen - mean), replace(cfg, name="ppo_clip")
    return lambda logprobs: run(replace(x, policy_logprobs=logprobs), cfg).loss


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gradient_is_that_of_finite_differences_on_both_signs(name: str, aggregation: str, sign: float) -> None:
    x = random_input(width=6, seed=3)
    x = replace(x, advantages=sign * (x.advantages.abs() + 0.1))
    cfg = make_config(aggregation, name=name, kl_weight=0.3)
    loss = surrogate(x, cfg)
    leaf = x.policy_logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (leaf,), eps=1e-7, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss(leaf), leaf)[0], value_and_grad(x, cfg)[1])


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_corrected_gradient_is_that_of_finite_differences(correction: str) -> None:
    x = random_input(width=6, seed=3)
    cfg = wide_limits("ppo_clip", correction)
    leaf = x.policy_logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(surrogate(x, cfg), (leaf,), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_a_kl_term_is_that_of_finite_differences(estimator: str) -> None:
    x = replace(random_input(width=6), advantages=torch.zeros(8, dtype=torch.float64))
    cfg = make_config(kl_weight=1.0, kl_estimator=estimator)
    leaf = x.policy_logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda lp: run(replace(x, policy_logprobs=lp), cfg).loss, (leaf,), eps=1e-7)


# Clipping on both signs


def one_token(advantage: float, log_ratio: float) -> LossInput:
    return LossInput(
        policy_logprobs=torch.tensor([[0.0, -1.0 + log_ratio]], dtype=torch.float64),
        behavior_logprobs=torch.tensor([[0.0, -1.0]], dtype=torch.float64),
        proximal_logprobs=torch.tensor([[0.0, -1.0]], dtype=torch.float64),
        loss_mask=torch.tensor([[False, True]]),
        advantages=torch.tensor([advantage], dtype=torch.float64),
    )


@pytest.mark.parametrize("name", ["gspo", "decoupled_ppo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-0.5, -0.1, 0.1, 0.5])
def test_on_one_token_at_equal_policies_gspo_and_decoupled_ppo_are_ppo(
    name: str, advantage: float, log_ratio: float
) -> None:
    x = one_token(advantage, log_ratio)
    value, grad = value_and_grad(x, make_config(name=name))
    expected, expected_grad = value_and_grad(x, make_config())
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-0.5, -0.1, 0.1, 0.5])
def test_cispo_never_loses_a_gradient_but_bounds_it(advantage: float, log_ratio: float) -> None:
    weight = min(max(math.exp(log_ratio), 0.8), 1.28)
    value, grad = value_and_grad(one_token(advantage, log_ratio), make_config(name="cispo"))
    assert float(grad[0, 1]) == pytest.approx(-advantage * weight)
    assert value == pytest.approx(-advantage * weight * (-1.0 + log_ratio))


def test_gspo_moves_all_tokens_of_a_sequence_alike() -> None:
    x = random_input(spread=0.02)
    _, grad = value_and_grad(x, make_config("seq_mean_token_mean", name="gspo"))
    for row, mask in zip(grad, x.loss_mask, strict=True):
        if mask.any():
            torch.testing.assert_close(row[mask], row[mask][:1].expand(int(mask.sum())))
            assert float(row[mask].abs().max()) > 0


def test_far_off_tokens_give_finite_numbers() -> None:
    for name, correction in EVERY:
        for far in (-2000.0, 2000.0):
            x = random_input()
            x = replace(x, behavior_logprobs=x.policy_logprobs + far)
            value, grad = value_and_grad(x, wide_limits(name, correction))
            assert math.isfinite(value), (name, correction)
            assert bool(grad.isfinite().all()), (name, correction)


@each_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str, correction: str, aggregation: str) -> None:
    x = random_input(spread=0.0)
    x = replace(x, ref_logprobs=x.policy_logprobs + x.advantages[:, None])  # a teacher that thinks as the reward does
    grad = value_and_grad(x, make_config(aggregation, name=name, correction=correction))[1]
    if name == "nll":
        x = replace(x, advantages=torch.ones_like(x.advantages))  # whatever was sampled is right
    torch.testing.assert_close(grad, value_and_grad(x, make_config(aggregation, name="reinforce"))[1])


# One gradient, however the step is cut, padded or packed


def matrices(x: LossInput) -> dict[str, Any]:
    return {k: v for k, v in vars(x).items() if isinstance(v, Tensor) and v.dim() == 2}


def floats(x: LossInput) -> dict[str, Any]:
    return {k: v for k, v in matrices(x).items() if v.is_floating_point()}


@each_loss
@pytest.mark.parametrize("cut", [[[1], [0, 2, 3, 5], [4, 6], [7]], [[7, 3], [5, 1, 0], [2, 6, 4]]])
def test_the_gradient_and_the_metrics_do_not_change_with_the_cut(
    name: str, correction: str, cut: list[list[int]]
) -> None:
    x = random_input(spread=0.2)
    cfg = wide_limits(name, correction, "seq_mean_token_mean", kl_weight=0.3)

    def grad_of(parts: list[list[int]]) -> tuple[Tensor, dict[str, float]]:
        total = torch.stack([denominator(x.loss_mask[p], cfg.aggregation) for p in parts]).sum()
        leaf = x.policy_logprobs.clone().requires_grad_()
        outs = [compute_loss(rows_of(replace(x, policy_logprobs=leaf), part), cfg, total) for part in parts]
        torch.stack([out.loss for out in outs]).sum().backward()
        assert leaf.grad is not None
        return leaf.grad, metric_means(add_metrics([out.metrics for out in outs]))

    (whole, metrics), (pieces, cut_metrics) = grad_of([list(range(8))]), grad_of(cut)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-15)
    assert cut_metrics == pytest.approx(metrics, rel=1e-12)


@each_loss
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_poisoned_padding_changes_nothing(name: str, correction: str, poison: float) -> None:
    x = random_input(spread=0.2)
    dirty = replace(x, **{k: torch.where(x.loss_mask, v, poison) for k, v in floats(x).items()})
    cfg = wide_limits(name, correction, kl_weight=0.3)
    (value, grad), (dirty_value, dirty_grad) = value_and_grad(x, cfg), value_and_grad(dirty, cfg)
    assert value == dirty_value
    assert torch.equal(grad, dirty_grad)
    assert bool((dirty_grad[~x.loss_mask] == 0).all())
    assert metric_means(run(dirty, cfg).metrics) == metric_means(run(x, cfg).metrics)


@each_loss
def test_episodes_that_went_through_packing_give_the_same_gradient(name: str, correction: str) -> None:
    x = random_input(width=40, spread=0.2)
    x = replace(x, **{k: widen(v, (0, 7)) for k, v in matrices(x).items()})
    lengths = x.loss_mask.size(1) - x.loss_mask.flip(1).long().argmax(1)
    lengths = torch.where(x.loss_mask.any(1), lengths, 1)
    flat = {
        "tokens": torch.arange(int(lengths.sum())),
        "loss_mask": torch.cat([row[:n] for row, n in zip(x.loss_mask, lengths, strict=True)]),
        "behavior_logprobs": torch.zeros(int(lengths.sum())),
        "token_versions": torch.zeros(int(lengths.sum()), dtype=torch.int64),
        "lengths": lengths,
        "rewards": torch.zeros(8),
        "advantages": torch.zeros(8),
        "group_id": torch.zeros(8, dtype=torch.int64),
    }
    order = [6, 1, 4, 0, 7, 3, 2, 5]
    packed = pad([pack([TensorDict(flat, batch_size=[])], [order[:3], order[3:]])])
    width = packed["tokens"].shape[1]
    assert width < 47  # another shape, another order
    moved = rows_of(replace(x, **{k: v[:, :width] for k, v in matrices(x).items()}), order)
    assert torch.equal(moved.loss_mask, packed["loss_mask"])
    cfg = wide_limits(name, correction, kl_weight=0.3)
    (value, grad), (moved_value, moved_grad) = value_and_grad(x, cfg), value_and_grad(moved, cfg)
    assert moved_value == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(moved_grad, grad[order, :width])


@each_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_micro_batch_with_nothing_to_train_gives_zero_in_the_graph(
    name: str, correction: str, aggregation: str
) -> None:
    x = random_input()
    nan = torch.full_like(x.policy_logprobs, float("nan"))
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    empty = replace(x, **dict.fromkeys(floats(x), nan))
    empty = replace(empty, policy_logprobs=torch.zeros_like(nan) * weight, loss_mask=torch.zeros_like(x.loss_mask))
    out = compute_loss(empty, wide_limits(name, correction, aggregation, kl_weight=0.5), 7)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert weight.grad is not None
    assert float(weight.grad) == 0.0
    assert out.metrics.keys() == run(x, wide_limits(name, correction, kl_weight=0.5)).metrics.keys()


# The critic


def test_the_value_loss_is_the_worse_of_moved_and_clipped() -> None:
    old, returns = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, 1.0])
    values = torch.tensor([0.1, 0.9, 0.9, 2.5], requires_grad=True)
    loss = clipped_value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([0.9**2 / 2, 0.8**2 / 2, 1.9**2 / 2, 1.5**2 / 2])
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 1.9, 1.5])  # moved far enough: stop


def test_the_gradient_of_the_value_loss_is_that_of_finite_differences() -> None:
    draw = torch.randn((3, 40), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = draw[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, draw[1], draw[2], 0.2), (leaf,), eps=1e-7)


# The KL term in the reward


def test_a_kl_in_the_reward_is_measured_and_not_added() -> None:
    x = random_input()
    value, grad = value_and_grad(x, make_config(kl_weight=0.3, kl_in="reward"))
    plain_value, plain_grad = value_and_grad(x, make_config())
    assert value == plain_value
    assert torch.equal(grad, plain_grad)
    in_loss = metric_means(run(x, make_config(kl_weight=0.3)).metrics)["loss/kl"]
    assert metric_means(run(x, make_config(kl_weight=0.3, kl_in="reward")).metrics)["loss/kl"] == in_loss
