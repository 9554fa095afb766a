"""How good a policy is at a set of prompts, from several samples of each, and how sure that is. Pure.

pass@k, the chance that one of k samples passes, by the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374). All
intervals are of 95 %, over prompts: samples of one prompt resemble each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
_RESAMPLES = 2000
_Z = 1.959964
"""Standard normal quantile of a two-sided interval of 95 %."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that k of `num_samples` drawn without putting back hold one that passed.

    Raises ValueError unless 1 <= k <= num_samples and 0 <= num_passed <= num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must lie in 1..{num_samples}, the number of samples, got {k}")
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"num_passed must lie in 0..{num_samples}, got {num_passed}")
    # The quotient as a product: of large n the binomials themselves overflow a float.
    failed = (1 - k / n for n in range(num_samples - num_passed + 1, num_samples + 1))
    return 1.0 - math.prod(max(0.0, factor) for factor in failed)


def ks_of(num_samples: int) -> list[int]:
    """The k that are told: powers of two below `num_samples`, and that number itself."""
    return sorted({*(2**i for i in range(num_samples.bit_length())), num_samples})


def wilson(num_passed: float, num_trials: float) -> Interval:
    """The score interval of a proportion (Wilson 1927): it stays within 0..1, and is sound at 0 and at 1."""
    p, z2 = num_passed / num_trials, _Z**2 / num_trials
    middle = (p + z2 / 2) / (1 + z2)
    half = _Z / (1 + z2) * math.sqrt(p * (1 - p) / num_trials + z2 / (4 * num_trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def pass_at_1(num_samples: int, passed: Sequence[int]) -> tuple[float, Interval]:
    """The share of samples that passed, `passed` of `num_samples` at each prompt, and its Wilson interval.

    Its trials are as many independent samples as have the variance that the prompts show: as many as there are
    prompts where all samples of a prompt agree, as many as there are samples where the prompt makes no difference.
    """
    shares = np.asarray(passed, dtype=np.float64) / num_samples
    prompts, p = len(shares), float(shares.mean())
    variance = float(shares.var(ddof=1)) / prompts if prompts > 1 else 0.0
    alike = p * (1 - p) / variance if variance > 0 else float(prompts)
    trials = min(max(alike, prompts), prompts * num_samples)
    return p, wilson(p * trials, trials)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, Interval]:
    """The mean of `values`, one a prompt, and its percentile interval over resampled prompts (Efron 1979)."""
    array = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(seed)
    picks = random.integers(len(array), size=(_RESAMPLES, len(array)))
    low, high = np.percentile(array[picks].mean(axis=1), [2.5, 97.5])
    return float(array.mean()), (float(low), float(high))
