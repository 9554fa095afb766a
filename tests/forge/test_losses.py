"""Laws of forge/losses.py: golden values and gradients, and one gradient however the batch is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from loss_cases import (
    ALGORITHMS,
    assert_golden,
    forward_input,
    gradient_input,
    kl_input,
    make_config,
    random_input,
    rows_of,
    run,
    value_and_grad,
)
from torch import Tensor
from torch.nn.functional import pad

from forge.errors import ConfigError, SchemaError
from forge.losses import (
    AGGREGATIONS,
    LOSSES,
    LossConfig,
    LossInput,
    TokenLoss,
    add_metrics,
    compute_loss,
    denominator,
    kl_divergence,
    metric_means,
)

# Golden numbers


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_estimators_equal_the_golden_values(estimator: str) -> None:
    x = forward_input()
    assert x.ref_logprobs is not None
    kl = kl_divergence(x.policy_logprobs, x.ref_logprobs, estimator)[x.loss_mask].mean()
    assert float(kl) == pytest.approx(ALGORITHMS["outputs"][f"kl_{estimator}_mean"], abs=1e-6)


def test_the_kl_term_equals_the_golden_value_and_gradient() -> None:
    assert_golden(value_and_grad(kl_input(), make_config(kl_weight=1.0, kl_estimator="k3")), "k3")


# Losses of one's own


def vanilla(x: LossInput, cfg: LossConfig) -> TokenLoss:
    return -cfg.params["scale"] * x.advantages * x.policy_logprobs, {"extra/scaled": x.advantages}


def test_an_own_loss_is_one_registered_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "vanilla", vanilla)
    out = run(forward_input(), make_config(name="vanilla", params={"scale": 3.0}))
    assert float(out.loss) == pytest.approx(3.0 * float(run(forward_input(), make_config(name="reinforce")).loss))
    assert "extra/scaled" in out.metrics


@dataclass(frozen=True, kw_only=True)
class WiderInput(LossInput):
    """A field that only a loss of one's own knows."""

    teacher_logprobs: Tensor


def test_a_loss_may_read_a_field_that_others_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def distil(x: LossInput, cfg: LossConfig) -> TokenLoss:
        assert isinstance(x, WiderInput)
        return kl_divergence(x.policy_logprobs, x.teacher_logprobs, "k3"), {}

    monkeypatch.setitem(LOSSES, "distil", distil)
    x = gradient_input()
    wide = WiderInput(**vars(x), teacher_logprobs=x.behavior_logprobs)
    assert_golden(value_and_grad(wide, make_config(name="distil")), "k3")
    run(wide, make_config())  # and the built-in loss does not mind the field


def test_an_own_loss_can_be_named_by_its_path() -> None:
    by_path = make_config(name="forge.policy_losses:ppo_clip")
    by_path.validate()
    assert torch.equal(run(forward_input(), by_path).loss, run(forward_input(), make_config()).loss)


def test_a_loss_that_is_not_one_value_per_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "scalar", lambda x, cfg: (x.policy_logprobs.sum(), {}))
    with pytest.raises(SchemaError, match=r"loss scalar returned shape \[\]"):
        run(forward_input(), make_config(name="scalar"))


# Clipping


@pytest.mark.parametrize(
    "advantage, log_ratio, value, slope",
    [
        (1.0, 0.10, -math.exp(0.10), -math.exp(0.10)),  # inside
        (1.0, 0.50, -1.28, 0.0),  # good and already likelier: stop
        (1.0, -0.50, -math.exp(-0.50), -math.exp(-0.50)),  # good but less likely: go on
        (-1.0, 0.10, math.exp(0.10), math.exp(0.10)),
        (-1.0, 0.50, math.exp(0.50), math.exp(0.50)),  # bad and likelier: push down, not clipped
        (-1.0, -0.50, 0.8, 0.0),  # bad and already less likely: stop
    ],
)
def test_clipping_stops_a_move_that_went_far_enough_on_both_signs(
    advantage: float, log_ratio: float, value: float, slope: float
) -> None:
    x = LossInput(
        policy_logprobs=torch.tensor([[0.0, -1.0 + log_ratio]], dtype=torch.float64),
        behavior_logprobs=torch.tensor([[0.0, -1.0]], dtype=torch.float64),
        loss_mask=torch.tensor([[False, True]]),
        advantages=torch.tensor([advantage], dtype=torch.float64),
    )
    loss, grad = value_and_grad(x, make_config())
    assert (loss, float(grad[0, 1])) == pytest.approx((value, slope), abs=1e-12)
    clipped = metric_means(run(x, make_config()).metrics)["ratio/clip_fraction"]
    assert clipped == (1.0 if slope == 0.0 else 0.0)


def test_dual_clip_bounds_only_tokens_with_negative_advantage() -> None:
    x = LossInput(
        policy_logprobs=torch.full((2, 2), -1.0, dtype=torch.float64),
        behavior_logprobs=torch.full((2, 2), -4.0, dtype=torch.float64),
        loss_mask=torch.tensor([[False, True]] * 2),
        advantages=torch.tensor([-1.0, 1.0], dtype=torch.float64),
    )
    loss, grad = value_and_grad(x, make_config(dual_clip=3.0))
    assert loss == pytest.approx((3.0 - 1.28) / 2)
    assert grad.abs().max() == 0.0
    assert value_and_grad(x, make_config())[0] == pytest.approx((math.exp(3.0) - 1.28) / 2)


@pytest.mark.parametrize("far", [-2000.0, 2000.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_far_off_token_gives_finite_numbers(far: float, estimator: str) -> None:
    x = forward_input()
    x = replace(x, behavior_logprobs=x.policy_logprobs + far, ref_logprobs=x.policy_logprobs + far)
    value, grad = value_and_grad(x, make_config(kl_weight=1.0, kl_estimator=estimator))
    assert math.isfinite(value)
    assert bool(grad.isfinite().all())


def test_k3_is_never_above_ten_and_never_below_zero() -> None:
    kl = kl_divergence(torch.linspace(-50, 50, 101), torch.zeros(101), "k3")
    assert kl.min() == 0.0
    assert kl.max() == 10.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_at_lag_zero_the_ratio_is_one_and_the_gradient_is_that_of_reinforce(aggregation: str) -> None:
    x = random_input()
    x = replace(x, behavior_logprobs=x.policy_logprobs)
    reinforce = make_config(aggregation, name="reinforce")
    cfg = make_config(aggregation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSSES, "reinforce", lambda x, cfg: (-x.advantages * x.policy_logprobs, {}))
        torch.testing.assert_close(value_and_grad(x, cfg)[1], value_and_grad(x, reinforce)[1])
    means = metric_means(run(x, cfg).metrics)
    assert means["ratio/mean"] == pytest.approx(1.0)
    assert means["ratio/clip_fraction"] == 0.0
    assert means["extra/kl_behavior"] == pytest.approx(0.0, abs=1e-12)


def test_two_versions_apart_clipping_engages() -> None:
    assert metric_means(run(random_input(), make_config()).metrics)["ratio/clip_fraction"] > 0.1


# One gradient, however the step is cut

CUTS = {
    "four micro-batches of two": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "uneven micro-batches, one of them empty": [[1], [0, 2, 3, 5], [4, 6], [7]],
    "two ranks": [[0, 2, 5, 7], [1, 3, 4, 6]],
    "two ranks with two micro-batches each": [[0, 7], [2, 5], [1], [3, 4, 6]],
    "one episode at a time": [[i] for i in range(8)],
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
def test_the_gradient_and_the_metrics_do_not_change_with_the_cut(
    aggregation: str, cut: list[list[int]], kl_weight: float
) -> None:
    """A step adds local denominators (all-reduce), then gradients; the parameter here is shared."""
    x = random_input()
    cfg = make_config(aggregation, kl_weight=kl_weight)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def grad_of(parts: list[list[int]]) -> tuple[Tensor, float, dict[str, float]]:
        total = torch.stack([denominator(x.loss_mask[p], aggregation) for p in parts]).sum()
        grad, loss, metrics = torch.zeros((), dtype=torch.float64), 0.0, []
        for part in parts:
            piece = rows_of(x, part)
            out = compute_loss(replace(piece, policy_logprobs=piece.policy_logprobs * scale), cfg, total)
            grad = grad + torch.autograd.grad(out.loss, scale)[0]
            loss += out.loss.item()
            metrics.append(out.metrics)
        return grad, loss, metric_means(add_metrics(metrics))

    whole, pieces = grad_of([list(range(8))]), grad_of(cut)
    torch.testing.assert_close(pieces[0], whole[0], rtol=1e-12, atol=0)
    assert pieces[1] == pytest.approx(whole[1], rel=1e-12)
    assert pieces[2] == pytest.approx(whole[2], rel=1e-12)


def test_ragged_micro_batches_weigh_tokens_not_micro_batches() -> None:
    """Ten tokens of loss 1 and a thousand of 0.1: a mean of local means would say 0.55."""
    mask = torch.zeros((2, 1001), dtype=torch.bool)
    mask[0, 1:11] = True
    mask[1, 1:] = True
    same = torch.full((2, 1001), -1.0, dtype=torch.float64)
    x = LossInput(
        policy_logprobs=same,
        behavior_logprobs=same,
        loss_mask=mask,
        advantages=torch.tensor([-1.0, -0.1], dtype=torch.float64),
    )
    total = denominator(mask, "token_mean")
    loss = sum(float(compute_loss(rows_of(x, [i]), make_config(), total).loss) for i in range(2))
    assert loss == pytest.approx(110 / 1010)


def test_sequences_without_a_policy_token_do_not_count() -> None:
    mask = torch.tensor([[False, True, True], [False, False, False]])
    assert int(denominator(mask, "token_mean")) == 2
    assert [int(denominator(mask, a)) for a in AGGREGATIONS[1:]] == [1, 1, 1]


# Padding and masks


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", ["ppo_clip", "careless"])
def test_poisoned_padding_changes_nothing(
    name: str, aggregation: str, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss need not think of padding: what it gets is clean, and what it returns there is not used."""
    monkeypatch.setitem(LOSSES, "careless", lambda x, cfg: (1.0 - x.advantages * x.policy_logprobs, {}))
    x = replace(random_input(), entropy=torch.rand((8, 50), dtype=torch.float64))
    cfg = make_config(aggregation, name=name, kl_weight=0.3, dual_clip=3.0)

    def poisoned(value: Tensor) -> Tensor:
        return torch.where(x.loss_mask, value, poison)

    floats = ("policy_logprobs", "behavior_logprobs", "ref_logprobs", "entropy")
    bad = {k: poisoned(v) for k, v in vars(x).items() if k in floats}
    bad["advantages"] = torch.where(x.loss_mask.any(1), x.advantages, poison)
    dirty = replace(x, **bad)
    value, grad = value_and_grad(x, cfg)
    if name == "careless" and aggregation == "token_mean":
        m = x.loss_mask
        policy = (1.0 - x.advantages[:, None] * x.policy_logprobs)[m].mean()
        assert x.ref_logprobs is not None
        kl = kl_divergence(x.policy_logprobs, x.ref_logprobs, "k3")[m].mean()
        assert value == pytest.approx(float(policy + 0.3 * kl))
    dirty_value, dirty_grad = value_and_grad(dirty, cfg)
    assert value == dirty_value
    assert torch.equal(grad, dirty_grad)
    assert bool((dirty_grad[~x.loss_mask] == 0).all())
    assert metric_means(run(dirty, cfg).metrics) == metric_means(run(x, cfg).metrics)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_more_padding_changes_nothing(aggregation: str) -> None:
    x = random_input()
    wide = {k: pad(v, (0, 9)) for k, v in vars(x).items() if isinstance(v, Tensor) and v.dim() == 2}
    cfg = make_config(aggregation, kl_weight=0.3)
    value, grad = value_and_grad(x, cfg)
    wide_value, wide_grad = value_and_grad(replace(x, **wide), cfg)
    assert wide_value == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(wide_grad[:, :50], grad)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("total", [0, 7])
def test_a_micro_batch_with_nothing_to_train_gives_zero_in_the_graph(aggregation: str, total: int) -> None:
    x = random_input()
    nan = torch.full_like(x.policy_logprobs, float("nan"))
    x = replace(x, loss_mask=torch.zeros_like(x.loss_mask), policy_logprobs=nan, behavior_logprobs=nan)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    logprobs = torch.zeros_like(nan) * weight
    out = compute_loss(replace(x, policy_logprobs=logprobs), make_config(aggregation, kl_weight=0.5), total)
    assert out.loss.item() == 0.0
    out.loss.backward()
    assert weight.grad is not None
    assert float(weight.grad) == 0.0
    assert math.isnan(metric_means(out.metrics)["ratio/mean"])


def test_an_advantage_per_token_is_as_good_as_one_per_episode() -> None:
    x = random_input()
    per_token = replace(x, advantages=x.advantages[:, None].expand(8, 50))
    assert torch.equal(run(per_token, make_config()).loss, run(x, make_config()).loss)


def test_bfloat16_logprobs_are_computed_in_float32() -> None:
    x = random_input()
    floats = {k: v for k, v in vars(x).items() if isinstance(v, Tensor) and v.is_floating_point()}
    low = {k: v.bfloat16() for k, v in floats.items()}
    exact = {k: v.bfloat16().float() for k, v in floats.items()}
    loss = run(replace(x, **low), make_config()).loss
    assert loss.dtype == torch.float32
    assert torch.equal(loss, run(replace(x, **exact), make_config()).loss)


# Metrics


def test_metrics_are_means_over_policy_tokens() -> None:
    x = replace(random_input(), entropy=torch.rand((8, 50), dtype=torch.float64))
    assert x.ref_logprobs is not None
    assert x.entropy is not None
    cfg = make_config(kl_weight=0.3)
    out = run(x, cfg)
    means, m = metric_means(out.metrics), x.loss_mask
    ratio = (x.policy_logprobs - x.behavior_logprobs).exp()
    assert means["ratio/mean"] == pytest.approx(float(ratio[m].mean()))
    assert means["extra/kl_behavior"] == pytest.approx(float((ratio - 1.0 - ratio.log())[m].mean()))
    assert means["extra/entropy"] == pytest.approx(float(x.entropy[m].mean()))
    assert float(out.loss) == pytest.approx(means["loss/policy"] + 0.3 * means["loss/kl"])
    assert int(out.metrics["ratio/mean"][1]) == int(m.sum())
    assert not any(v.requires_grad for v in out.metrics.values())


def test_without_exact_entropy_the_metric_says_that_it_is_approximate() -> None:
    x = random_input()
    means = metric_means(run(x, make_config()).metrics)
    assert means["extra/entropy_approx"] == pytest.approx(-float(x.policy_logprobs[x.loss_mask].mean()))
    assert "loss/kl" not in means


# What a user gets wrong


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"name": "ppo"}, "'ppo', which is not registered; use one of .*ppo_clip.*, or module:function"),
        ({"name": "nowhere:loss"}, r"loss\.name is 'nowhere:loss', which cannot be imported .*No module"),
        ({"name": "forge.losses:nothing"}, "cannot be imported"),
        ({"name": "forge.kl:KL_LIMIT"}, "is a float, not a function"),
        ({"clip_low": 1.5}, r"loss\.clip_low must be in \[0, 1\], got 1\.5"),
        ({"clip_high": -0.1}, r"loss\.clip_high must be >= 0, got -0\.1"),
        ({"dual_clip": 0.5}, r"loss\.dual_clip must be > 1, or null, got 0\.5"),
        ({"kl_weight": -1.0}, r"loss\.kl_weight must be >= 0, got -1\.0"),
        ({"gamma": -1.0}, r"loss\.gamma must be in \[0, 1\], got -1\.0"),
        ({"lam": 1.5}, r"loss\.lam must be in \[0, 1\], got 1\.5; 1 discounts nothing"),
        ({"token_advantages": "gea"}, r"loss\.token_advantages is 'gea', .*use one of gae, reinforce_pp"),
        ({"kl_weight": 0.1, "kl_in": "reward"}, r"loss\.kl_in is reward, loss\.token_advantages episode"),
        ({"kl_estimator": "k4"}, r"loss\.kl_estimator must be k1, k2 or k3, got k4"),
        ({"aggregation": "mean"}, r"loss\.aggregation must be in .*token_mean.*, got mean"),
        ({"aggregation": "seq_mean_token_sum_norm"}, r"loss\.norm_length must be >= 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LossConfig(**changes).validate()


def test_the_defaults_are_valid() -> None:
    LossConfig().validate()


def test_a_kl_weight_without_reference_logprobs_is_an_error() -> None:
    with pytest.raises(SchemaError, match=r"ref_logprobs is missing; loss\.kl_weight is 0\.1"):
        run(replace(random_input(), ref_logprobs=None), make_config(kl_weight=0.1))


@pytest.mark.parametrize(
    "name, shape", [("behavior_logprobs", (8, 1)), ("advantages", (8, 1)), ("policy_logprobs", (1, 50))]
)
def test_a_shape_that_would_broadcast_silently_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(SchemaError, match=name):
        run(replace(random_input(), **{name: torch.zeros(shape)}), make_config())


def test_a_mask_of_numbers_is_refused() -> None:
    x = random_input()
    with pytest.raises(SchemaError, match=r"loss_mask is torch\.int64 \[8, 50\], expected bool"):
        run(replace(x, loss_mask=x.loss_mask.long()), make_config())
