"""From what one token costs to the scalar of a step: pure functions, and the one place where tokens are summed.

    LossInput [B, T] --masked()--> loss function --> loss per token [B, T] --x correction--aggregate--> scalar
                                                     + metrics per token       (+ KL term)

A loss function (`forge/policy_losses.py`) says only what one token costs. `compute_loss` does the rest, the same for
every loss: it blanks what is not under the mask before any arithmetic (NaN in padding reaches neither the loss nor the
gradient), weighs tokens by the correction, adds the KL term, and divides by a denominator that counts the *whole*
optimizer step, all micro-batches and all ranks. A gradient is therefore the same from one big batch, k micro-batches
or several ranks; whoever sums over ranks must sum, not average.

Your own loss is one function; register it in LOSSES or name it as `module:function` in `loss.name`:

    def reinforce(x: LossInput, cfg: LossConfig) -> TokenLoss:
        return -x.advantages * x.policy_logprobs, {}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from forge.corrections import correction_weights, sequence_mean
from forge.diagnostics import (
    RATIO_SQUARE,
    effective_sample_size,
    engine_mismatch,
    masked_sum,
    ratio_square,
    staleness_ratio,
)
from forge.errors import ConfigError, SchemaError
from forge.kl import KlEstimator, kl_divergence, probability_ratio
from forge.loss_config import AGGREGATIONS, Aggregation, LossConfig
from forge.loss_input import LossInput, TokenLoss
from forge.policy_losses import LOSSES
from forge.registry import lookup

__all__ = [
    "AGGREGATIONS",
    "LOSSES",
    "Aggregation",
    "KlEstimator",
    "LossConfig",
    "LossInput",
    "LossOutput",
    "Metrics",
    "TokenLoss",
    "add_metrics",
    "aggregate",
    "compute_loss",
    "denominator",
    "kl_divergence",
    "metric_means",
    "probability_ratio",
]

Metrics: TypeAlias = dict[str, Tensor]
"""Name -> float64 `[2]`: a sum and its count. Add them over micro-batches and ranks, then divide."""


@dataclass(frozen=True)
class LossOutput:
    """`loss`: scalar, this micro-batch's share of the step's loss. `metrics`: sums and counts."""

    loss: Tensor
    metrics: Metrics


def denominator(loss_mask: Tensor, aggregation: str) -> Tensor:
    """This micro-batch's part of the step's denominator, int64 scalar; add it over everything.

    token_mean counts policy tokens. The seq_* aggregations count sequences that hold at least one
    policy token, so that an episode masked as a whole, or a filler row, does not dilute the mean.
    """
    if aggregation == "token_mean":
        return loss_mask.sum()
    return loss_mask.any(dim=1).sum()


def aggregate(values: Tensor, loss_mask: Tensor, cfg: LossConfig) -> Tensor:
    """The numerator that belongs to `denominator`: `[B, T]` -> scalar."""
    values = torch.where(loss_mask, values, 0.0)
    if cfg.aggregation == "seq_mean_token_mean":
        return sequence_mean(values, loss_mask).sum()
    if cfg.aggregation == "seq_mean_token_sum_norm":
        if cfg.norm_length is None:
            raise ConfigError("loss.norm_length is null; seq_mean_token_sum_norm needs a token count")
        return values.sum() / cfg.norm_length
    return values.sum()


def compute_loss(x: LossInput, cfg: LossConfig, global_denominator: Tensor | float) -> LossOutput:
    """Loss and metrics of one micro-batch.

    `global_denominator` is `denominator(...)` added over all micro-batches and ranks of the optimizer
    step. A micro-batch without policy tokens gives exactly 0, still connected to the graph. Raises
    SchemaError for shapes that do not fit and for an optional field that `cfg` needs and `x` lacks.
    """
    x = x.masked()
    token_loss, token_metrics = lookup(cfg.name, LOSSES, "loss.name")(x, cfg)
    if token_loss.shape != x.loss_mask.shape:
        shapes = f"{list(token_loss.shape)}, expected one value per token {list(x.loss_mask.shape)}"
        raise SchemaError(f"loss {cfg.name} returned shape {shapes}")
    if cfg.correction != "none":
        weight = correction_weights(x, cfg)
        token_loss = weight * token_loss
        token_metrics = {"extra/correction_weight": weight, "extra/dropped": weight == 0, **token_metrics}
    policy = loss = aggregate(token_loss, x.loss_mask, cfg)
    if cfg.kl_weight:
        ref = x.need("ref_logprobs", f"loss.kl_weight is {cfg.kl_weight}, it needs them or 0")
        kl = kl_divergence(x.policy_logprobs, ref, cfg.kl_estimator)
        if cfg.kl_in == "loss":
            loss = loss + cfg.kl_weight * aggregate(kl, x.loss_mask, cfg)
        token_metrics = {"loss/kl": kl, **token_metrics}
    # A count, so the clamp acts only where nothing at all is trained.
    count = torch.as_tensor(global_denominator, device=loss.device).clamp(min=1)
    per_token = {**_common(x), **token_metrics}
    metrics = {name: _sum_and_count(value, x.loss_mask) for name, value in per_token.items()}
    metrics["loss/policy"] = _pair(policy, denominator(x.loss_mask, cfg.aggregation))
    return LossOutput(loss=loss / count, metrics=metrics | _diagnostics(x))


def add_metrics(parts: Iterable[Mapping[str, Tensor]]) -> Metrics:
    """The metrics of several micro-batches as one."""
    total: Metrics = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def metric_means(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Sum over count for each name. Where nothing was counted: nan, and keys below extra/ are left out.

    `extra/effective_sample_size` is made here, since it is no mean but follows from two.
    """
    means = {name: float(value[0] / value[1]) for name, value in metrics.items() if _measured(name, value)}
    square = means.pop(RATIO_SQUARE, None)
    if square is not None:
        means["extra/effective_sample_size"] = effective_sample_size(means["ratio/mean"], square)
    return means


def _measured(name: str, value: Tensor) -> bool:
    return not name.startswith("extra/") or float(value[1]) > 0


@torch.no_grad()
def _common(x: LossInput) -> dict[str, Tensor]:
    """What a run says about any loss: how far the policy has moved from the one that sampled."""
    out = {
        "ratio/mean": probability_ratio(x.policy_logprobs, x.behavior_logprobs),
        "ratio/clip_fraction": torch.zeros_like(x.loss_mask),
        "extra/kl_behavior": kl_divergence(x.behavior_logprobs, x.policy_logprobs, "k3"),
    }
    if x.entropy is None:
        return {**out, "extra/entropy_approx": -x.policy_logprobs}
    return {**out, "extra/entropy": x.entropy}


def _diagnostics(x: LossInput) -> Metrics:
    out = {RATIO_SQUARE: ratio_square(x)}
    if x.token_versions is None or x.policy_version is None:
        return out
    return {**out, "extra/engine_mismatch": engine_mismatch(x), "extra/staleness_ratio": staleness_ratio(x)}


def _sum_and_count(value: Tensor, loss_mask: Tensor) -> Tensor:
    """Of each policy token, or of each episode that has one."""
    return masked_sum(value, loss_mask if value.dim() == 2 else loss_mask.any(dim=1))


def _pair(total: Tensor, count: Tensor) -> Tensor:
    return torch.stack([total.detach().to(torch.float64), count.to(torch.float64)])
