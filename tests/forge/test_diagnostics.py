"""Laws of forge/diagnostics.py: engine, staleness and sample size are told apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import make_config, random_input, rows_of, run

from forge.diagnostics import engine_mismatch, staleness_ratio
from forge.errors import SchemaError
from forge.losses import LossInput, add_metrics, metric_means


def two_versions() -> LossInput:
    """Row 0 is of the trainer's version 7, off by 0.01 nats either way; row 1 of version 5, now twice as likely."""
    gap = torch.tensor([[9.0, 0.01, -0.01], [9.0, math.log(2.0), math.log(2.0)]], dtype=torch.float64)
    return LossInput(
        policy_logprobs=-1.0 + gap,
        behavior_logprobs=torch.full_like(gap, -1.0),
        loss_mask=torch.tensor([[False, True, True]] * 2),
        advantages=torch.ones(2, dtype=torch.float64),
        token_versions=torch.tensor([[7, 7, 7], [7, 5, 5]]),
        policy_version=7,
    )


def test_mismatch_is_read_off_fresh_tokens_and_staleness_off_old_ones() -> None:
    means = metric_means(run(two_versions(), make_config()).metrics)
    assert means["extra/engine_mismatch"] == pytest.approx(0.01)
    assert means["extra/staleness_ratio"] == pytest.approx(2.0)


def test_both_compare_the_trainer_at_the_start_of_the_step_where_it_is_known() -> None:
    x = two_versions()
    moved = replace(x, proximal_logprobs=x.policy_logprobs, policy_logprobs=x.policy_logprobs + 1.0)
    assert torch.equal(engine_mismatch(moved.masked()), engine_mismatch(x.masked()))
    assert torch.equal(staleness_ratio(moved.masked()), staleness_ratio(x.masked()))


def test_what_was_not_measured_is_left_out() -> None:
    x = two_versions()
    fresh = metric_means(run(replace(x, token_versions=torch.full((2, 3), 7)), make_config()).metrics)
    assert "extra/staleness_ratio" not in fresh
    assert "extra/engine_mismatch" in fresh
    for lacking in (replace(x, token_versions=None), replace(x, policy_version=None)):
        means = metric_means(run(lacking, make_config()).metrics)
        assert not {"extra/engine_mismatch", "extra/staleness_ratio"} & means.keys()
        with pytest.raises(SchemaError, match=r"(token_versions|policy_version) is missing"):
            engine_mismatch(lacking)


def test_on_policy_the_whole_batch_counts() -> None:
    x = random_input(spread=0.0)
    assert metric_means(run(x, make_config()).metrics)["extra/effective_sample_size"] == pytest.approx(1.0)


def test_the_effective_sample_size_is_that_of_the_whole_batch_however_it_is_cut() -> None:
    x = random_input()
    weight = (x.policy_logprobs - x.behavior_logprobs).exp()[x.loss_mask]
    expected = float(weight.sum() ** 2 / (weight.numel() * weight.square().sum()))
    parts = [run(rows_of(x, rows), make_config()).metrics for rows in ([0, 2], [1, 3, 7], [4, 5, 6])]
    assert metric_means(add_metrics(parts))["extra/effective_sample_size"] == pytest.approx(expected)
    assert 0.0 < expected < 1.0


def test_one_token_that_outweighs_all_others_leaves_a_sample_of_one() -> None:
    x = two_versions()
    x = replace(x, policy_logprobs=x.behavior_logprobs + torch.tensor([[0.0, 12.0, 0.0], [0.0, 0.0, 0.0]]))
    size = metric_means(run(x, make_config()).metrics)["extra/effective_sample_size"]
    assert size == pytest.approx(1 / 4, rel=1e-3)
