"""Laws of forge/preference_losses.py: values by hand, derivatives, and pairs that nothing tears apart."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import make_config, random_input, rows_of, run, value_and_grad
from torch import Tensor

from forge.errors import ConfigError, SchemaError
from forge.loss_input import Needs, needs, needs_of
from forge.losses import LossConfig, LossInput, TokenLoss, add_metrics, compute_loss, denominator, metric_means
from forge.preference_losses import bradley_terry, dpo


def dpo_config(**params: float) -> LossConfig:
    return make_config("seq_mean_token_sum", name="dpo", params=params)


def two_pairs() -> LossInput:
    """Gains of the four rows, sum of policy - ref: 2, -1, -0.5, 0.5; of 2, 1, 3 and 1 tokens."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
    gaps = torch.tensor([[9, 0.5, 1.5, 9], [9, -1, 9, 9], [9, -1, 0.25, 0.25], [9, 9, 9, 0.5]], dtype=torch.float64)
    ref = -torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4)
    return LossInput(
        policy_logprobs=ref + gaps,
        behavior_logprobs=torch.zeros_like(ref),
        ref_logprobs=ref,
        loss_mask=mask,
        advantages=torch.zeros(4, dtype=torch.float64),
    )


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def test_dpo_is_the_mean_over_pairs_of_minus_log_sigmoid_of_the_margin() -> None:
    value, grad = value_and_grad(two_pairs(), dpo_config(beta=0.2))
    assert value == pytest.approx(-(log_sigmoid(0.6) + log_sigmoid(-0.2)) / 2, rel=1e-12)
    # d/dm of -log sigmoid(m) is -sigmoid(-m); every policy token of the pair moves alike, in opposite directions.
    first, second = (0.2 / (1 + math.exp(m)) / 2 for m in (0.6, -0.2))
    expected = two_pairs().loss_mask * torch.tensor([[-first], [first], [-second], [second]], dtype=torch.float64)
    torch.testing.assert_close(grad, expected)


def test_label_smoothing_takes_a_share_of_the_labels_for_wrong() -> None:
    value, _ = value_and_grad(two_pairs(), dpo_config(beta=0.2, label_smoothing=0.1))
    right, wrong = (log_sigmoid(0.6) + log_sigmoid(-0.2)) / 2, (log_sigmoid(-0.6) + log_sigmoid(0.2)) / 2
    assert value == pytest.approx(-0.9 * right - 0.1 * wrong, rel=1e-12)


def test_the_metrics_of_dpo_are_means_over_pairs_whatever_their_length() -> None:
    metrics = metric_means(run(two_pairs(), dpo_config(beta=0.2)).metrics)
    assert metrics["extra/pair_margin"] == pytest.approx((0.6 - 0.2) / 2)
    assert metrics["extra/pair_accuracy"] == 0.5
    assert metrics["extra/chosen_gain"] == pytest.approx((2 - 0.5) / 2)
    assert metrics["extra/rejected_gain"] == pytest.approx((-1 + 0.5) / 2)


def pairs_input(**options: Any) -> LossInput:
    """`random_input` whose last pair has nothing to train."""
    x = random_input(**options)
    mask = x.loss_mask.clone()
    mask[-2:] = False
    return replace(x, loss_mask=mask)


@pytest.mark.parametrize("params", [{}, {"beta": 2.0, "label_smoothing": 0.2}])
def test_the_gradient_of_dpo_is_that_of_finite_differences(params: dict[str, float]) -> None:
    x = pairs_input(width=6, seed=3)
    leaf = x.policy_logprobs.clone().requires_grad_()
    cfg = dpo_config(**params)
    assert torch.autograd.gradcheck(lambda lp: run(replace(x, policy_logprobs=lp), cfg).loss, (leaf,), eps=1e-7)


@pytest.mark.parametrize("cut", [[[2, 3], [6, 7, 0, 1], [4, 5]], [[4, 5, 2, 3, 0, 1], [6, 7]]])
def test_neither_the_gradient_nor_the_metrics_change_with_the_cut_between_pairs(cut: list[list[int]]) -> None:
    x, cfg = pairs_input(), dpo_config()

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


def test_poisoned_padding_and_far_off_policies_stay_finite() -> None:
    x = pairs_input()
    poisoned: dict[str, Any] = {
        k: torch.where(x.loss_mask, v, float("nan")) for k, v in vars(x).items() if k.endswith("logprobs")
    }
    assert value_and_grad(replace(x, **poisoned), dpo_config())[0] == value_and_grad(x, dpo_config())[0]
    for far in (-1e5, 1e5):
        assert x.ref_logprobs is not None
        value, grad = value_and_grad(replace(x, ref_logprobs=x.ref_logprobs + far), dpo_config())
        assert math.isfinite(value)
        assert bool(grad.isfinite().all())


def test_pairs_without_anything_to_train_give_zero_in_the_graph() -> None:
    x = random_input()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    empty = replace(x, policy_logprobs=x.policy_logprobs * weight, loss_mask=torch.zeros_like(x.loss_mask))
    out = compute_loss(empty, dpo_config(), 7)
    out.loss.backward()
    assert (out.loss.item(), float(weight.grad if weight.grad is not None else 1)) == (0.0, 0.0)
    assert out.metrics.keys() == run(x, dpo_config()).metrics.keys()


def test_what_is_no_pair_and_what_is_missing_are_errors() -> None:
    x = random_input()
    with pytest.raises(SchemaError, match=r"3 rows are no pairs"):
        run(rows_of(x, [0, 1, 2]), dpo_config())
    with pytest.raises(SchemaError, match=r"ref_logprobs is missing; loss.name dpo"):
        run(replace(x, ref_logprobs=None), dpo_config())
    with pytest.raises(SchemaError, match=r"3 rows are no pairs"):
        bradley_terry(torch.zeros(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": "token_mean"}, r"aggregation is token_mean with loss\.name dpo.* only seq_mean_token_sum"),
        ({"params": {"betta": 0.1}}, r"loss\.params has 'betta', which loss dpo does not read; it reads beta and"),
        ({"params": {"beta": 0.0}}, r"beta must be > 0, got 0\.0"),
        ({"params": {"label_smoothing": 0.5}}, r"label_smoothing must lie in \[0, 0\.5\), got 0\.5"),
        ({"correction": "tis"}, r"loss\.correction is tis.* use none and episode"),
        ({"token_advantages": "gae"}, r"loss\.token_advantages gae"),
    ],
)
def test_a_section_that_a_loss_of_pairs_cannot_work_with_is_refused(changes: dict[str, Any], message: str) -> None:
    dpo_config().validate()
    with pytest.raises(ConfigError, match=message):
        replace(dpo_config(), **changes).validate()


def test_a_loss_says_what_it_needs() -> None:
    @needs(together=4)
    def own(x: LossInput, cfg: LossConfig) -> TokenLoss:
        return x.policy_logprobs, {}

    assert needs_of(own) == Needs(reference=False, together=4)
    assert needs_of(dpo) == LossConfig(name="dpo").needs == Needs(reference=True, together=2)
    assert LossConfig().needs == Needs()
    wants = {name: LossConfig(name=name).needs_reference for name in ("ppo_clip", "nll", "dpo", "reverse_kl")}
    assert wants == {"ppo_clip": False, "nll": False, "dpo": True, "reverse_kl": True}
    assert LossConfig(kl_weight=0.1).needs_reference


# Scalar scores


def test_bradley_terry_by_hand() -> None:
    scores = torch.tensor([1.5, 0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss, right = bradley_terry(scores)
    assert loss.tolist() == pytest.approx([-log_sigmoid(1.0), -log_sigmoid(-3.0)], rel=1e-12)
    assert right.tolist() == [True, False]
    assert torch.autograd.gradcheck(lambda s: bradley_terry(s)[0], (scores,), eps=1e-7)


# The teacher's signal


def test_on_policy_the_distillation_loss_is_the_gap_to_the_teacher_and_pulls_towards_it() -> None:
    x = random_input(spread=0.0)
    assert x.ref_logprobs is not None
    sign = torch.where(torch.arange(x.loss_mask.shape[1]) % 2 == 0, 1.0, -1.0)
    x = replace(x, ref_logprobs=x.policy_logprobs + sign, advantages=torch.full_like(x.advantages, float("nan")))
    value, grad = value_and_grad(x, make_config(name="reverse_kl", kl_estimator="k1"))
    tokens = int(x.loss_mask.sum())
    assert value == pytest.approx(float(-(sign * x.loss_mask).sum() / tokens))
    torch.testing.assert_close(grad, -sign * x.loss_mask / tokens, check_dtype=False)
    metrics = metric_means(run(x, make_config(name="reverse_kl", kl_estimator="k1")).metrics)
    assert metrics["loss/kl"] == pytest.approx(value)


@pytest.mark.parametrize(("log_ratio", "gap", "moves"), [(1.0, 2.0, False), (1.0, 0.5, False), (-1.0, 2.0, True)])
def test_a_token_that_has_moved_far_enough_towards_the_teacher_is_left_alone(
    log_ratio: float, gap: float, moves: bool
) -> None:
    policy = torch.tensor([[0.0, -3.0]], dtype=torch.float64)
    x = LossInput(
        policy_logprobs=policy,
        behavior_logprobs=policy - log_ratio,
        ref_logprobs=policy + gap,
        loss_mask=torch.tensor([[False, True]]),
        advantages=torch.zeros(1, dtype=torch.float64),
    )
    grad = value_and_grad(x, make_config(name="reverse_kl"))[1]
    assert (float(grad[0, 1]) != 0) == moves
