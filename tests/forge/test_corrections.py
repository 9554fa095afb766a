"""Laws of forge/corrections.py: golden weights, limits, and that no gap between two policies is counted twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import (
    ALGORITHMS,
    forward_input,
    make_config,
    random_input,
    run,
    value_and_grad,
)
from torch import Tensor

from forge.corrections import CORRECTIONS, behavior_weights, correction_weights, sequence_mean
from forge.errors import ConfigError, SchemaError
from forge.losses import LossConfig, LossInput, metric_means

NEEDS_PROXIMAL = [{"correction": name} for name in CORRECTIONS] + [{"name": "decoupled_ppo"}]


def weights(x: LossInput, correction: str, **limits: Any) -> Tensor:
    return correction_weights(x.masked(), make_config(correction=correction, **limits))


def with_gaps(gaps: list[list[float]], mask: list[list[int]] | None = None) -> LossInput:
    """`proximal - behavior` is `gaps`."""
    gap = torch.tensor(gaps, dtype=torch.float64)
    return LossInput(
        policy_logprobs=torch.full_like(gap, -1.0),
        proximal_logprobs=torch.full_like(gap, -1.0),
        behavior_logprobs=-1.0 - gap,
        loss_mask=torch.ones_like(gap, dtype=torch.bool) if mask is None else torch.tensor(mask).bool(),
        advantages=torch.ones(len(gaps), dtype=torch.float64),
    )


# Values


def test_sequence_weights_equal_the_golden_numbers() -> None:
    x = forward_input(three_policies=True)
    got = weights(x, "seq_tis", weight_high=1e9)
    assert got[:, 0].tolist() == pytest.approx(ALGORITHMS["outputs"]["tis_seq"], abs=1e-6)
    assert bool((got == got[:, :1]).all())
    capped = weights(x, "seq_tis", weight_high=0.5)[:, 0]
    assert capped.tolist() == pytest.approx([min(w, 0.5) for w in ALGORITHMS["outputs"]["tis_seq"]], abs=1e-6)


@pytest.mark.parametrize("correction, key", [("seq_mask", "tis_seq"), ("geo_mask", "geo_ratio")])
def test_a_sequence_mask_follows_the_golden_ratio(correction: str, key: str) -> None:
    x = forward_input(three_policies=True)
    for row, ratio in enumerate(ALGORITHMS["outputs"][key]):
        for low, high, kept in [
            (ratio - 1e-6, ratio + 1e-6, 1.0),
            (ratio + 1e-6, ratio + 1.0, 0.0),
            (0.0, ratio - 1e-6, 0.0),
        ]:
            got = weights(x, correction, weight_low=low, weight_high=high)[row]
            assert got.tolist() == [kept] * 5


def test_token_weights_stay_within_their_limits() -> None:
    x = with_gaps([[-3.0, -0.6, 0.0, 0.6, 1.5, 1.7]])
    ratio = torch.tensor([[-3.0, -0.6, 0.0, 0.6, 1.5, 1.7]], dtype=torch.float64).exp()
    torch.testing.assert_close(weights(x, "tis"), ratio.clamp(max=2.0))
    inside = torch.tensor([[0, 1, 1, 1, 1, 0]])  # 0.05 and 5.47 lie outside [0.5, 5]
    torch.testing.assert_close(weights(x, "icepop"), ratio * inside)


@pytest.mark.parametrize(
    "correction, gap, kept",
    [
        ("seq_mask", 0.68, 1.0),
        ("seq_mask", 0.70, 0.0),  # e^0.70 = 2.01
        ("seq_mask", -0.68, 1.0),
        ("seq_mask", -0.70, 0.0),
        ("geo_mask", 0.0099, 1.0),
        ("geo_mask", 0.0101, 0.0),
        ("geo_mask", -0.0100, 1.0),
        ("geo_mask", -0.0102, 0.0),
    ],
)
def test_the_usual_limits_of_sequence_masks(correction: str, gap: float, kept: float) -> None:
    total = gap if correction == "seq_mask" else 4 * gap
    x = with_gaps([[total / 2, 0.0, 99.0, 0.0, total / 2]], mask=[[1, 1, 0, 1, 1]])
    assert weights(x, correction)[0, 0] == kept


def test_decoupled_ppo_masks_or_clamps_what_is_above_its_limit() -> None:
    x = with_gaps([[-2.0, 0.0, 1.0, 1.7]]).masked()
    ratio = torch.tensor([[-2.0, 0.0, 1.0, 1.7]], dtype=torch.float64).exp()
    mask = behavior_weights(x, make_config(name="decoupled_ppo"))
    clamp = behavior_weights(x, make_config(name="decoupled_ppo", weight_over="clamp"))
    torch.testing.assert_close(mask, ratio * torch.tensor([[1, 1, 1, 0]]))
    torch.testing.assert_close(clamp, ratio.clamp(max=5.0))


def test_the_mean_of_a_sequence_steps_over_holes() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    values = torch.tensor([[1.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    assert sequence_mean(values, mask).tolist() == [[2.5], [0.0]]


# Nothing is counted twice


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "reinforce"])
def test_without_a_correction_the_proximal_policy_is_not_looked_at(name: str) -> None:
    x = random_input()
    value, grad = value_and_grad(x, make_config(name=name))
    bare_value, bare_grad = value_and_grad(replace(x, proximal_logprobs=None), make_config(name=name))
    assert value == bare_value
    assert torch.equal(grad, bare_grad)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_where_the_proximal_policy_sampled_a_correction_changes_nothing(name: str, correction: str) -> None:
    x = random_input()
    x = replace(x, proximal_logprobs=x.behavior_logprobs)
    value, grad = value_and_grad(x, make_config(name=name, correction=correction))
    plain_value, plain_grad = value_and_grad(x, make_config(name=name))
    assert value == pytest.approx(plain_value, rel=1e-12)
    torch.testing.assert_close(grad, plain_grad)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_under_a_correction_the_ratio_is_against_the_proximal_policy(correction: str) -> None:
    x = random_input(spread=0.3)
    cfg = make_config(correction=correction, weight_high=1e3)
    weight = correction_weights(x.masked(), cfg)
    anchored = replace(x, behavior_logprobs=x.proximal_logprobs)
    against_proximal = value_and_grad(anchored, make_config())[1]
    torch.testing.assert_close(value_and_grad(x, cfg)[1], weight * against_proximal)


@pytest.mark.parametrize("changes", NEEDS_PROXIMAL)
def test_no_gradient_flows_through_a_weight_or_an_anchor(changes: dict[str, Any]) -> None:
    x = random_input(spread=0.3)
    proximal = x.proximal_logprobs.clone().requires_grad_()
    policy = x.policy_logprobs.clone().requires_grad_()
    run(replace(x, policy_logprobs=policy, proximal_logprobs=proximal), make_config(**changes)).loss.backward()
    assert proximal.grad is None
    assert policy.grad is not None


@pytest.mark.parametrize("changes", NEEDS_PROXIMAL)
def test_without_proximal_logprobs_it_says_what_needs_them(changes: dict[str, Any]) -> None:
    x = replace(random_input(), proximal_logprobs=None)
    who = f"loss.correction {changes['correction']}" if "correction" in changes else "loss.name decoupled_ppo"
    with pytest.raises(SchemaError, match=f"proximal_logprobs is missing; {who} compares them"):
        run(x, make_config(**changes))


def test_a_token_of_weight_zero_stays_in_the_denominator() -> None:
    x = with_gaps([[0.0, 0.0, 9.0, 9.0]])
    out = run(x, make_config(correction="icepop"))
    assert float(out.loss) == pytest.approx(-0.5)
    means = metric_means(out.metrics)
    assert means["extra/dropped"] == 0.5
    assert means["extra/correction_weight"] == 0.5


# What a user gets wrong


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"correction": "tsi"}, r"loss\.correction must be one of none, tis, .*geo_mask, got tsi"),
        ({"weight_high": 2.0}, r"loss\.weight_high is 2\.0, correction none has none; leave it out"),
        ({"weight_low": 0.5}, r"loss\.weight_low is 0\.5, correction none has none; leave it out"),
        ({"correction": "tis", "weight_low": 0.5}, r"loss\.weight_low is 0\.5, correction tis has none"),
        ({"correction": "tis", "weight_high": 0.0}, r"loss\.weight_high must be > 0 and >= weight_low 0\.0, got 0\.0"),
        ({"correction": "icepop", "weight_low": -1.0}, r"loss\.weight_low must be >= 0, got -1\.0"),
        (
            {"correction": "icepop", "weight_low": 6.0},
            r"loss\.weight_high must be .*>= weight_low 6\.0, got 5\.0; raise",
        ),
        ({"name": "decoupled_ppo", "weight_high": -1.0}, r"loss\.weight_high must be > 0"),
        ({"name": "decoupled_ppo", "correction": "tis"}, r"loss\.correction is tis, loss\.name decoupled_ppo, .*use"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LossConfig(**changes).validate()


@pytest.mark.parametrize("changes", [*NEEDS_PROXIMAL, {"name": "decoupled_ppo", "weight_high": 1.2}])
def test_every_correction_is_valid_with_its_usual_limits(changes: dict[str, Any]) -> None:
    LossConfig(**changes).validate()
