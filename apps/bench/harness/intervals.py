"""Means of a few runs and how sure they are; what counts as equal, and what as worse. Pure.

Intervals are bootstrapped over runs (Efron 1979): no assumption about how rewards are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

_RESAMPLES = 10_000
Verdict = Literal["equal", "worse", "better", "open"]


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def of_mean(values: Sequence[float]) -> Interval:
    """The mean of `values`, one a run."""
    draws = _resampled(values, np.random.default_rng(0))
    return _interval(float(np.mean(values)), draws)


def of_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """The mean of `values` less that of `baseline`, independent runs."""
    random = np.random.default_rng(0)
    draws = _resampled(values, random) - _resampled(baseline, random)
    return _interval(float(np.mean(values) - np.mean(baseline)), draws)


def verdict(difference: Interval, margin: float) -> Verdict:
    """equal: the whole interval lies within the margin; worse, better: beyond it; open: the runs do not tell."""
    if -margin < difference.low and difference.high < margin:
        return "equal"
    if difference.high < -margin:
        return "worse"
    return "better" if difference.low > margin else "open"


def curve(runs: Sequence[Sequence[float]], window: int = 5) -> tuple[list[float], list[float], list[float]]:
    """Mean, low and high at each step of runs of equal length, each smoothed by a trailing mean of `window` steps."""
    smoothed = [[float(np.mean(run[max(0, n + 1 - window) : n + 1])) for n in range(len(run))] for run in runs]
    points = [of_mean(values) for values in zip(*smoothed, strict=True)]
    return [p.mean for p in points], [p.low for p in points], [p.high for p in points]


def steps_to(rewards: Sequence[float], level: float, window: int = 5) -> int | None:
    """The first step at which the trailing mean reaches `level`, counted from 1; None if it never does."""
    for end in range(window, len(rewards) + 1):
        if float(np.mean(rewards[end - window : end])) >= level:
            return end
    return None


def _resampled(values: Sequence[float], random: np.random.Generator) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    return random.choice(array, size=(_RESAMPLES, len(array))).mean(axis=1)


def _interval(mean: float, draws: np.ndarray) -> Interval:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(mean, float(low), float(high))
