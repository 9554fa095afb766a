"""The arithmetic of the benches: from time stamps and rounds to the figures that are compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

WARM_UP = 5
"""Steps at the start that count for nothing: caches, compilers and pipelines fill."""


@dataclass(frozen=True)
class Rates:
    """A steady state: the inverse of the median step, and all its samples over all its time."""

    steps_per_s: float
    samples_per_s: float


def steady(stamps: Sequence[float], samples_per_step: int, warm_up: int = WARM_UP) -> Rates:
    """The rates after `warm_up` steps; `stamps` is the second at which each step ended.

    A pipeline may alternate between short and long steps, which a median hides: samples/s therefore comes from
    the whole time. Raises ValueError when nothing is left to measure.
    """
    if warm_up < 1 or len(stamps) <= warm_up:
        raise ValueError(
            f"{len(stamps)} steps leave nothing to measure after {warm_up} of warm-up, which must be >= 1; "
            f"run at least {max(warm_up, 1) + 1}"
        )
    window = stamps[warm_up - 1 :]
    steps = [later - earlier for earlier, later in pairwise(window)]
    return Rates(1 / statistics.median(steps), samples_per_step * len(steps) / (window[-1] - window[0]))


def first_and_last(values: Sequence[float], span: int = 5) -> tuple[float, float]:
    """Means of the first and of the last `span` values; they overlap when there are fewer than twice as many."""
    return statistics.fmean(values[:span]), statistics.fmean(values[-span:])


def ratio(values: Sequence[float], bases: Sequence[float]) -> float:
    """Median over the rounds of value / base: a round in which the whole machine was slow counts as any other."""
    return statistics.median(value / base for value, base in zip(values, bases, strict=True))


def turns(names: Sequence[T], round: int) -> list[T]:
    """The order of round number `round`: each goes first once in `len(names)` rounds."""
    shift = round % len(names)
    return [*names[shift:], *names[:shift]]
