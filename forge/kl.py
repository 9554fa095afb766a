"""How far apart two policies are at a sampled token: the probability ratio, and estimators of the KL divergence.

Every exponent is clamped, so that one far-off token can make no number infinite. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from torch import Tensor

EXPONENT_LIMIT = 20.0
KL_LIMIT = 10.0

KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]


def probability_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """`exp(logprobs - base_logprobs)`, the exponent clamped to +-20: finite, and no gradient beyond."""
    return bounded_exp(logprobs - base_logprobs)


def bounded_exp(gap: Tensor) -> Tensor:
    """`exp(gap)`, `gap` clamped to +-20."""
    return gap.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


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

    With `d = policy - ref`: k1 is d, k2 is d^2 / 2, k3 is exp(-d) + d - 1 (Schulman 2020).
    """
    return KL_ESTIMATORS[estimator](logprobs - ref_logprobs)
