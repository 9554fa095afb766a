"""Policy losses: pure functions on one input, and the one place where tokens become a scalar.

    LossInput [B, T] --masked()--> loss function --> loss per token [B, T] --aggregate--> scalar
                                                     + metrics per token      (+ KL to the reference)

A loss function says only what one token costs. `compute_loss` does the rest, the same for every
loss: it blanks what is not under the mask before any arithmetic (NaN in padding reaches neither the
loss nor the gradient), adds the KL term, and divides by a denominator that counts the *whole*
optimizer step, all micro-batches and all ranks. A gradient is therefore the same from one big batch,
k micro-batches or several ranks; whoever sums over ranks must sum, not average.

Your own loss is one function; register it in LOSSES or name it as `module:function` in `loss.name`:

    def reinforce(x: LossInput, cfg: LossConfig) -> TokenLoss:
        return -x.advantages * x.policy_logprobs, {}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor

from forge.errors import ConfigError, SchemaError
from forge.registry import lookup

EXPONENT_LIMIT = 20.0
KL_LIMIT = 10.0

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

TokenLoss: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""Loss per token `[B, T]`, and metrics per token `[B, T]` for means over its policy tokens."""

Metrics: TypeAlias = dict[str, Tensor]
"""Name -> float64 `[2]`: a sum and its count. Add them over micro-batches and ranks, then divide."""


@dataclass
class LossConfig:
    """What the trainer minimises."""

    name: str = "ppo_clip"
    """Loss per token: a registered name, or module:function for your own."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low; a fraction in [0, 1]."""
    clip_high: float = 0.28
    """The probability ratio is clipped above at 1 + clip_high; a fraction >= 0."""
    dual_clip: float | None = None
    """Bound on the loss of a token with negative advantage, times -advantage (3 is usual); null: off."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number."""
    norm_length: int | None = None
    """Tokens; the constant length that seq_mean_token_sum_norm divides by, usually the new-token budget."""
    kl_weight: float = 0.0
    """Weight of the KL divergence to the reference policy in the loss, >= 0; 0: no reference is needed."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL from one sample; the gradient of k1 is zero in expectation."""
    params: dict[str, float] = field(default_factory=dict)
    """Free numbers for a loss of your own, read as cfg.params['x']."""

    def validate(self) -> None:
        """Raises ConfigError naming the first field that cannot work."""
        lookup(self.name, LOSSES, "loss.name")
        _require(self.clip_low, 0.0 <= self.clip_low <= 1.0, "loss.clip_low", "in [0, 1]")
        _require(self.clip_high, self.clip_high >= 0.0, "loss.clip_high", ">= 0")
        dual_ok = self.dual_clip is None or self.dual_clip > 1.0
        _require(self.dual_clip, dual_ok, "loss.dual_clip", "> 1, or null")
        _require(self.kl_weight, self.kl_weight >= 0.0, "loss.kl_weight", ">= 0")
        _require(self.aggregation, self.aggregation in AGGREGATIONS, "loss.aggregation", f"in {AGGREGATIONS}")
        _require(self.kl_estimator, self.kl_estimator in KL_ESTIMATORS, "loss.kl_estimator", "k1, k2 or k3")
        length_ok = self.aggregation != "seq_mean_token_sum_norm" or (self.norm_length or 0) >= 1
        _require(self.norm_length, length_ok, "loss.norm_length", ">= 1 with seq_mean_token_sum_norm")


@dataclass(frozen=True, kw_only=True)
class LossInput:
    """What a loss may read. Fields to come are optional, so a loss reads by name and keeps working.

    Inside a loss function everything is `[B, T]`, at least float32, and 0 outside `loss_mask`.
    """

    policy_logprobs: Tensor
    """`[B, T]`, under the weights being trained; carries the gradient."""
    behavior_logprobs: Tensor
    """`[B, T]`, as recorded when the token was sampled."""
    loss_mask: Tensor
    """bool `[B, T]`, True where the policy itself produced the token."""
    advantages: Tensor
    """`[B]` per episode or `[B, T]` per token; `[B, T]` inside a loss function."""
    ref_logprobs: Tensor | None = None
    """`[B, T]`, under the frozen reference; needed when kl_weight > 0."""
    entropy: Tensor | None = None
    """`[B, T]` nats, of the policy's distribution at each token; for metrics only."""

    def masked(self) -> Self:
        """A copy that is 0 outside the mask, whatever stood there (NaN included)."""
        mask = self.loss_mask
        if mask.dtype != torch.bool or mask.dim() != 2:
            raise SchemaError(f"loss_mask is {mask.dtype} {list(mask.shape)}, expected bool [B, T]")
        clean: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if name != "loss_mask" and isinstance(value, Tensor):
                clean[name] = _blank(name, value, mask)
        return replace(self, **clean)


@dataclass(frozen=True)
class LossOutput:
    """`loss`: scalar, this micro-batch's share of the step's loss. `metrics`: sums and counts."""

    loss: Tensor
    metrics: Metrics


def ppo_clip(x: LossInput, cfg: LossConfig) -> TokenLoss:
    """`max(-A r, -A clip(r, 1 - low, 1 + high))`, `r = exp(policy - behavior)`; dual clip for A < 0."""
    ratio = probability_ratio(x.policy_logprobs, x.behavior_logprobs)
    plain = -x.advantages * ratio
    clipped = -x.advantages * ratio.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    loss = torch.maximum(plain, clipped)
    if cfg.dual_clip is not None:
        bounded = torch.minimum(loss, -x.advantages * cfg.dual_clip)
        loss = torch.where(x.advantages < 0, bounded, loss)
    return loss, {"ratio/clip_fraction": clipped > plain}


LOSSES: dict[str, Callable[[LossInput, LossConfig], TokenLoss]] = {"ppo_clip": ppo_clip}


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """`exp(logprobs - old_logprobs)`, the exponent clamped to +-20: finite, and no gradient beyond."""
    return (logprobs - old_logprobs).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def _k3(gap: Tensor) -> Tensor:
    gap = gap.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return ((-gap).exp() + gap - 1.0).clamp(-KL_LIMIT, KL_LIMIT)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap: gap,
    "k2": lambda gap: gap.square() / 2.0,
    "k3": _k3,
}


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) estimated at each sampled token, `[B, T]` nats.

    With `d = policy - ref`: k1 is d, k2 is d^2 / 2, k3 is exp(-d) + d - 1.
    """
    return KL_ESTIMATORS[estimator](logprobs - ref_logprobs)


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
        return (values.sum(dim=1) / loss_mask.sum(dim=1).clamp(min=1)).sum()
    if cfg.aggregation == "seq_mean_token_sum_norm":
        if cfg.norm_length is None:
            raise ConfigError("loss.norm_length is null; seq_mean_token_sum_norm needs a token count")
        return values.sum() / cfg.norm_length
    return values.sum()


def compute_loss(x: LossInput, cfg: LossConfig, global_denominator: Tensor | float) -> LossOutput:
    """Loss and metrics of one micro-batch.

    `global_denominator` is `denominator(...)` added over all micro-batches and ranks of the optimizer
    step. A micro-batch without policy tokens gives exactly 0, still connected to the graph. Raises
    SchemaError for shapes that do not fit and for a missing ref_logprobs.
    """
    x = x.masked()
    token_loss, token_metrics = lookup(cfg.name, LOSSES, "loss.name")(x, cfg)
    if token_loss.shape != x.loss_mask.shape:
        shapes = f"{list(token_loss.shape)}, expected one value per token {list(x.loss_mask.shape)}"
        raise SchemaError(f"loss {cfg.name} returned shape {shapes}")
    policy = loss = aggregate(token_loss, x.loss_mask, cfg)
    if cfg.kl_weight:
        if x.ref_logprobs is None:
            raise SchemaError(f"ref_logprobs is missing; loss.kl_weight is {cfg.kl_weight}, it needs them or 0")
        kl = kl_divergence(x.policy_logprobs, x.ref_logprobs, cfg.kl_estimator)
        loss = policy + cfg.kl_weight * aggregate(kl, x.loss_mask, cfg)
        token_metrics = {"loss/kl": kl, **token_metrics}
    # A count, so the clamp acts only where nothing at all is trained.
    count = torch.as_tensor(global_denominator, device=loss.device).clamp(min=1)
    per_token = {**_common(x), **token_metrics}
    metrics = {name: _token_sum(value, x.loss_mask) for name, value in per_token.items()}
    metrics["loss/policy"] = _pair(policy, denominator(x.loss_mask, cfg.aggregation))
    return LossOutput(loss=loss / count, metrics=metrics)


def add_metrics(parts: Iterable[Mapping[str, Tensor]]) -> Metrics:
    """The metrics of several micro-batches as one."""
    total: Metrics = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def metric_means(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Sum over count for each name; nan where nothing was counted."""
    return {name: float(value[0] / value[1]) for name, value in metrics.items()}


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


def _token_sum(values: Tensor, loss_mask: Tensor) -> Tensor:
    return _pair(torch.where(loss_mask, values.detach().to(torch.float64), 0.0).sum(), loss_mask.sum())


def _pair(total: Tensor, count: Tensor) -> Tensor:
    return torch.stack([total.detach().to(torch.float64), count.to(torch.float64)])


def _blank(name: str, value: Tensor, mask: Tensor) -> Tensor:
    if name == "advantages" and value.shape == mask.shape[:1]:
        value = value[:, None].expand_as(mask)
    if value.shape != mask.shape:
        raise SchemaError(f"{name} has shape {list(value.shape)}, loss_mask {list(mask.shape)}; make them equal")
    if value.is_floating_point():
        value = value.to(torch.promote_types(value.dtype, torch.float32))
    return torch.where(mask, value, torch.zeros((), dtype=value.dtype, device=value.device))


def _require(value: object, ok: bool, option: str, limit: str) -> None:
    if not ok:
        raise ConfigError(f"{option} must be {limit}, got {value}")
